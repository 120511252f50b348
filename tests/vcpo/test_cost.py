"""The cost model of norms and sums, against the operations that are counted while norms are computed."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from vcpo.gradnorm import Segments, WeightedSums, add_weighted_per_sequence, cost, squared_norms
from vcpo.gradnorm.linear import gram_costs_less

SHORT, LONG = [50, 60, 70, 80], [600, 400]
SHAPES = [(128, 128), (128, 512), (512, 192)]


def operations(lengths: list[int], inputs: int, outputs: int) -> dict[str, int]:
    """Of the products that each form really makes."""
    segments = Segments.of_lengths(lengths)
    x, dy = torch.ones(sum(lengths), inputs), torch.ones(sum(lengths), outputs)
    nothing = torch.empty(0, len(lengths))
    forms = {
        "norms": lambda: squared_norms(x, dy, segments),
        "direct": lambda: add_weighted_per_sequence(x, dy, segments, nothing, []),
    }
    counted = {}
    for name, form in forms.items():
        with FlopCounterMode(display=False) as counter:
            form()
        counted[name] = counter.get_total_flops()
    return counted


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("lengths", [SHORT, LONG, [130, 20, 300]])
def test_the_model_counts_the_operations_that_are_done(lengths: list[int], inputs: int, outputs: int) -> None:
    """Catches a form that does something else than the model says, and a model that prefers the form with far more."""
    only_operations = cost.Rates(1.0, 1.0, math.inf, math.inf, 0.0, 0.0, symmetric=True)
    counted = operations(lengths, inputs, outputs)
    expected = {form: getattr(cost, form)(lengths, inputs, outputs, only_operations) for form in ("gram", "direct")}
    assert counted["direct"] == expected["direct"]
    gram = gram_costs_less(Segments.of_lengths(lengths), inputs, outputs)
    assert counted["norms"] == expected["gram" if gram else "direct"]
    if max(expected.values()) > 2 * min(expected.values()):
        assert gram == (expected["gram"] < expected["direct"])


def test_both_forms_are_among_the_cases() -> None:
    assert {gram_costs_less(Segments.of_lengths(n), *shape) for n in (SHORT, LONG) for shape in SHAPES} == {True, False}


@pytest.mark.parametrize(("inputs", "outputs"), [(640, 960), (64, 96)])
@pytest.mark.parametrize("length", [50, 3000])
def test_the_model_counts_a_gpus_products(length: int, inputs: int, outputs: int) -> None:
    """Catches a model of other products than those of `WeightedSums`; sequences of one length have no padding."""
    lengths, rewards = [length] * 6, [1.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    x, dy = (torch.empty(sum(lengths), size, device="meta") for size in (inputs, outputs))
    sums = WeightedSums(Segments.of_lengths(lengths, "meta"), [rewards, [1.0] * 6])
    with FlopCounterMode(display=False) as counter:
        sums.add(x, dy, [torch.empty(outputs, inputs, device="meta")] * 2, torch.empty(6, device="meta"))
    gpu = cost.GPU_FLOAT32
    only_operations = replace(gpu, operations=1.0, of_one_sequence=1.0, memory=math.inf, nearby=math.inf, own_call=0.0)
    own = cost.own_product(2, inputs, outputs, gpu) < cost.norm([length], inputs, outputs, gpu)
    expected = cost.plain(sum(lengths), inputs, outputs, only_operations)
    if not own:
        gram = cost.gram([length], inputs, outputs, gpu) < cost.direct([length], inputs, outputs, gpu)
        form = cost.gram if gram else cost.direct
        expected += form(lengths, inputs, outputs, only_operations)
    assert counter.get_total_flops() == expected


def test_kinds_of_devices() -> None:
    assert [cost.rates("cpu", 2), cost.rates("cuda", 2), cost.rates("cuda", 4)] == [
        cost.CPU,
        cost.GPU_BFLOAT16,
        cost.GPU_FLOAT32,
    ]
