"""One training step of an actor or a critic, and a comparison of a resumed run of such steps with an unbroken run."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from tests.kit.actor import loss_function  # applies the environment first

import torch  # isort: skip
from tensordict import TensorDict
from verl.workers.config import McoreCriticConfig
from verl.workers.utils.losses import value_loss

from tests.kit.layout_run import ParallelLayout
from tests.kit.layout_worker import make_batch
from vcpo import EssPart
from verl_vcpo.actor.vcpo_settings import VCPOSettings

ONE_PROCESS = ParallelLayout("one process")


def with_returns(batch: TensorDict) -> TensorDict:
    """Add a critic's fields: `returns`, each token's being its sequence's reward, and old `values` of 0."""
    returns = [torch.full_like(rewards, rewards.sum().item()) for rewards in batch["rm_scores"].unbind()]
    batch["returns"] = torch.nested.as_nested_tensor(returns, layout=torch.jagged)
    batch["values"] = torch.nested.as_nested_tensor([torch.zeros_like(r) for r in returns], layout=torch.jagged)
    return batch


def train_actor(engine: Any, seed: int) -> dict[str, Any]:
    """Make a VCPO update on the batch of `seed` whose step follows the lag part; return its metrics."""
    return _train(engine, make_batch(ONE_PROCESS, seed), loss_function(VCPOSettings(ess_part=EssPart.LAG)))


def train_critic(engine: Any, seed: int) -> dict[str, Any]:
    """Update verl's critic on the batch of `seed`; return the metrics."""
    config = McoreCriticConfig(ppo_micro_batch_size_per_gpu=2, cliprange_value=100.0)
    return _train(engine, with_returns(make_batch(ONE_PROCESS, seed)), partial(value_loss, config))


def _train(engine: Any, batch: TensorDict, loss: partial[Any]) -> dict[str, Any]:
    with engine.train_mode():
        outputs = engine.train_batch(batch, loss)
        engine.lr_scheduler_step()
    return outputs["metrics"]


def parameters(engine: Any) -> dict[str, torch.Tensor]:
    """Return the engine's parameters under Megatron's names, copied to the host."""
    with engine.eval_mode():  # brings offloaded parameters back
        named = (pair for chunk in engine.module for pair in chunk.named_parameters())
        return {name: parameter.detach().cpu().clone() for name, parameter in named}


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of any element of any tensor."""
    assert one.keys() == other.keys()
    return max((one[name].float() - other[name].float()).abs().max().item() for name in one)


def stopped_and_not(
    build: Callable[[], Any], train: Callable[[Any, int], Any], before: int, folder: Path
) -> tuple[float, float]:
    """Train `before` steps and two more; then again the two more, from a checkpoint in `folder`, in a new engine.

    Returns:
        (the difference of the parameters of the two runs, the change of the parameters by the two steps).
    """

    def after(engine: Any, steps: Iterable[int]) -> dict[str, torch.Tensor]:
        for seed in steps:
            train(engine, seed)
        return parameters(engine)

    engine = build()
    start = after(engine, range(before))
    engine.save_checkpoint(str(folder))
    straight = after(engine, range(before, before + 2))
    resumed = build()
    resumed.load_checkpoint(str(folder), del_local_after_load=False)
    assert largest_difference(parameters(resumed), start) == 0.0
    return largest_difference(straight, after(resumed, range(before, before + 2))), largest_difference(straight, start)
