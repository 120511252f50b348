"""Rows that are stored together are stored as rows one by one are."""

import asyncio
import inspect
import re
from typing import Any

import pytest
import torch
import transfer_queue as tq
from tensordict import TensorDict
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_vcpo.samplers import gathered_puts
from verl_vcpo.samplers.gathered_puts import GatheredPuts

Stored = list[tuple[list[str], TensorDict | None, list[dict[str, Any]]]]


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Stored:
    """What TransferQueue is asked to store; the key "bad" is refused, and "slow" takes 0.2 s."""
    asked: Stored = []

    async def put(keys: list[str], partition_id: str, tags: Any, fields: TensorDict | None = None) -> None:
        if "slow" in keys:
            await asyncio.sleep(0.2)
        if "bad" in keys:
            raise RuntimeError("no room")
        asked.append((keys, fields, tags))

    monkeypatch.setattr(gathered_puts.transfer_queue, "async_kv_batch_put", put)
    return asked


def row(tokens: int, **others: Any) -> dict[str, Any]:
    return {"responses": torch.arange(tokens), "raw_prompt": [{"content": "x"}], "metrics": {"n": tokens}, **others}


def test_rows_of_one_moment_are_one_request(requests: Stored) -> None:
    rows = [row(3), row(1), row(3, routed_experts=torch.ones(4, 2)), row(3, routed_experts=None), row(0)]

    async def main() -> None:
        puts = GatheredPuts()
        await puts.async_kv_put("first", "train", {"status": "running"})
        both = [puts.async_kv_put("u", "train", {name: 1}) for name in ("reason", "final")]
        of_rows = [puts.async_kv_batch_put([f"k{i}"], "train", [{"i": i}], [row]) for i, row in enumerate(rows)]
        await asyncio.gather(*of_rows, *both)

    asyncio.run(main())
    assert [keys for keys, _, _ in requests[1:]] == [["k0", "k1", "k4"], ["k2"], ["k3"], ["u"]]
    assert requests[-1][2] == [{"reason": 1, "final": 1}]
    _, together, tags = requests[1]
    assert together is not None and tags == [{"i": 0}, {"i": 1}, {"i": 4}]
    for i, one in enumerate([0, 1, 4]):
        alone = list_of_dict_to_tensordict([rows[one]])
        assert torch.equal(together["responses"].unbind()[i], alone["responses"].unbind()[0])
        for name in ("raw_prompt", "metrics"):
            assert together[i].get(name).tolist() == alone[0].get(name).tolist()


def test_what_cannot_be_stored_fails_alone(requests: Stored) -> None:
    async def main() -> list[Any]:
        puts = GatheredPuts()
        each = [puts.async_kv_put(key, "train", {}) for key in ("good", "bad", "also good")]
        return await asyncio.gather(*each, return_exceptions=True)

    assert [str(error) for error in asyncio.run(main())] == ["None", "no room", "None"]
    assert [keys for keys, _, _ in requests] == [["good"], ["also good"]]


def test_nothing_is_written_later_for_a_prompt_that_was_stopped(requests: Stored) -> None:
    async def main() -> None:
        puts = GatheredPuts()
        waiting, other = (asyncio.ensure_future(puts.async_kv_put(key, "train", {})) for key in ("waiting", "other"))
        await asyncio.sleep(0)
        waiting.cancel()
        await other
        slow = asyncio.ensure_future(puts.async_kv_put("slow", "train", {}))
        await asyncio.sleep(2 * gathered_puts.GATHER_S)
        for _ in range(2):
            slow.cancel()
            await asyncio.sleep(0.01)
        await asyncio.wait({slow})
        assert slow.cancelled() and [keys for keys, _, _ in requests] == [["other"], ["slow"]]

    asyncio.run(main())


def test_transfer_queue_has_the_names_that_verls_worker_uses() -> None:
    used = {*re.findall(r"\btq\.(\w+)", inspect.getsource(agent_loop_tq))}
    assert "async_kv_put" in used and all(hasattr(tq, name) and hasattr(GatheredPuts, name) for name in used)
