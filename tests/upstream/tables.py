"""All tables, by the page of docs/reference/upstream that has them."""

from tests.upstream import (
    afterwards,
    agent_loops,
    cpu,
    megatron,
    others,
    rollout,
    start,
    trainer,
    transformer_engine,
    weights,
    workers,
)

PAGES = {
    module.__name__.rpartition(".")[2]: (module.__doc__ or "", module.PLACES)
    for module in (
        trainer,
        agent_loops,
        start,
        workers,
        weights,
        rollout,
        megatron,
        transformer_engine,
        others,
        cpu,
        afterwards,
    )
}
PLACES = tuple(place for _, places in PAGES.values() for place in places)
