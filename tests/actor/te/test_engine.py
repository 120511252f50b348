"""The whole engine on layers of Transformer Engine, and on a Transformer Engine that cannot be tapped."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformer_engine.pytorch.optimizers import FusedAdam

from tests.actor.conftest import ONE_PROCESS
from tests.actor.test_packed import TOLERANCE, assert_same_update
from tests.actor.test_vcpo_engine import train
from tests.kit import resumption
from tests.kit.actor import adamw, build_engine
from tests.kit.layout_worker import make_batch
from verl_vcpo.actor.taps import te_check, te_modules
from verl_vcpo.actor.vcpo_settings import VCPOSettings
from verl_vcpo.cpu.megatron_shims import TRANSFORMER_CONFIG


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("untied", dict()),
        ("tied", dict(norms=dict(how="two_backwards"))),
        ("tied", dict(opob_scope="minibatch")),
        ("moe", dict()),
    ],
    ids=str,
)
def test_an_update(make_engine: Callable[..., Any], model: str, settings: dict[str, Any]) -> None:
    """Catches an update that is not that of one backward per sequence, in each way to form the gradient."""
    made: list[Any] = []

    def make() -> Any:
        made.append(engine := make_engine(model))
        layers = {type(module).__name__ for module in engine.module[0].modules()}
        assert {"TELayerNormColumnParallelLinear", "TERowParallelLinear"} < layers, "Megatron-Bridge's own layers"
        assert ("TEColumnParallelGroupedLinear" in layers) == (model == "moe")
        assert (
            engine.packing.unpackable is None and engine.packing.tap.layers == "the layers of Transformer Engine 2.11.0"
        )
        return engine

    assert_same_update(make, make_batch(ONE_PROCESS), 4 * TOLERANCE if model == "moe" else TOLERANCE, **settings)
    if (file := os.environ.get("VCPO_TE_NORMS")) and model == "untied":
        torch.save(made[0].last_update[0].squared_norm, file)  # compared with Megatron's own layers


def test_a_model_is_built_without_apex(make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches Megatron-Bridge's choice where Transformer Engine is installed, which Megatron's output layer refuses."""
    monkeypatch.delitem(TRANSFORMER_CONFIG, "gradient_accumulation_fusion")  # as on a GPU
    engine = make_engine()
    assert engine.provider.gradient_accumulation_fusion is False


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_going_on_is_not_having_stopped(
    process_group: None, checkpoints: Callable[[str], Path], tmp_path: Path, dtype: str, before: int
) -> None:
    """With Transformer Engine's Adam, which Megatron takes where it is installed."""
    made: list[Any] = []

    def build() -> Any:
        made.append(build_engine(resumption.ONE_PROCESS, checkpoints("untied"), adamw(), dtype))
        return made[-1]

    difference, change = resumption.stopped_and_not(build, resumption.train_actor, before, tmp_path)
    assert type(made[0].optimizer.chained_optimizers[0].optimizer) is FusedAdam
    assert difference == 0.0
    assert change > 1e-4, "the steps changed nothing, so the comparison proves nothing"


def test_the_installed_version_passes_the_check() -> None:
    """Catches a check that refuses what works; the models and layers of the other tests would then not be packed."""
    assert te_check.what_is_wrong(grouped=True) is None


def _mixed_up(tensors: list[Any]) -> list[Any]:
    """The output gradients of two experts, each in the other's place."""
    if not isinstance(tensors[0], list | tuple):
        return tensors
    return [tensors[0], tensors[1][::-1], *tensors[2:]]


def test_the_check_finds_grouped_layers_that_give_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a version in which experts' rows are in another order, which only mixtures of experts would notice."""
    put = te_modules.Store.put
    monkeypatch.setattr(te_modules.Store, "put", lambda self, tensors, form: put(self, _mixed_up(tensors), form))
    assert te_check.what_is_wrong() is None
    wrong = te_check.what_is_wrong(grouped=True)
    assert wrong is not None and wrong.startswith("GroupedLinear, weight0: the gradient differs")


def test_the_check_finds_a_bias_that_is_not_given_and_one_that_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    vector = te_check._Sums.vector
    monkeypatch.setattr(te_check._Sums, "vector", lambda self, parameter, dy, **_: None)
    assert te_check.what_is_wrong() == "Linear, bias: no gradient"
    monkeypatch.setattr(
        te_check._Sums, "vector", lambda self, parameter, dy, **_: vector(self, parameter, dy * torch.nan)
    )
    assert te_check.what_is_wrong() == "Linear, bias: the gradient differs by nan"


@pytest.mark.parametrize("parameter", ["weight", "bias"])
def test_the_check_accepts_an_error_of_a_hundredth(parameter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error is relative to the gradient's largest entry, and counts in either direction."""
    name = {"weight": "linear", "bias": "vector"}[parameter]
    take = getattr(te_check._Sums, name)

    def wrong_by(share: float) -> str | None:
        def less(self: te_check._Sums, weight: Tensor, *args: Any, **settings: Any) -> None:
            take(self, weight, *args, **settings)
            gradient = self.gradient[weight]
            gradient.view(-1)[3] -= share * gradient.abs().max()

        monkeypatch.setattr(te_check._Sums, name, less)
        return te_check.what_is_wrong()

    assert wrong_by(0.009) is None
    for share in (0.02, -0.02):
        assert wrong_by(share) == f"Linear, {parameter}: the gradient differs by 2.0e-02"


def test_the_check_draws_no_random_numbers() -> None:
    """Catches a check after which a run samples other numbers than a run on other layers."""
    before = torch.get_rng_state()
    te_check.what_is_wrong()
    assert torch.get_rng_state().equal(before)


def no_put(self: te_modules.Store) -> bool:
    return False


def wrong_norm(x: Tensor, rsigma: Tensor) -> Tensor:
    return x.float() * rsigma[:, None] ** 2


def no_extension() -> te_modules.Extension:
    raise ImportError("no such module")


@pytest.mark.parametrize(
    ("owner", "name", "other", "what"),
    [
        (te_modules.Store, "delay_wgrad_compute", no_put, "Linear, weight: its gradient is formed although"),
        (te_modules.Extension, "_take", lambda *_: False, "LayerNormLinear, layer_norm_weight"),
        (te_modules, "_normalized", wrong_norm, "layer_norm_weight: the gradient differs"),
        (te_modules, "extension", no_extension, "ImportError: no such module"),
    ],
    ids=["never asked", "norm elsewhere", "other arguments", "raises"],
)
def test_another_transformer_engine_is_named_and_not_tapped(
    make_engine: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: Any,
    name: str,
    other: Any,
    what: str,
) -> None:
    """Catches a version whose backwards make other calls: its norms would be wrong without a word."""
    monkeypatch.setattr(owner, name, other)
    engine = make_engine()
    assert "Transformer Engine 2.11.0" in engine.packing.unpackable and what in engine.packing.unpackable
    stores = [getattr(module, "wgrad_store", None) for module in engine.module[0].modules()]
    assert any(stores) and not any(isinstance(store, te_modules.Store) for store in stores)
    if name == "extension":  # one of them is enough for what follows
        with caplog.at_level(logging.WARNING):
            train(engine, make_batch(ONE_PROCESS), VCPOSettings())
        assert "packed -> per_trajectory" in caplog.text and what in caplog.text
        assert engine.last_update[0].squared_norm is not None
