"""One backward per sequence: what no layout shows (test_layouts.py has ranks of every kind)."""

from types import SimpleNamespace

import pytest
import torch

from verl_vcpo.actor.update import per_trajectory

GIVEN = dict(no_sync_func="theirs", grad_sync_func="theirs", moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.2)
GIVEN_BIAS = {"moe_router_enable_expert_bias": True}


def test_regularisers_are_off_in_the_block_alone() -> None:
    config = SimpleNamespace(**GIVEN, **GIVEN_BIAS)
    chunk = SimpleNamespace(config=config)
    with pytest.raises(ZeroDivisionError), per_trajectory._score_gradients_only([chunk]):  # type: ignore[list-item]
        assert vars(config) == per_trajectory._SWITCHED_OFF and config.moe_z_loss_coeff is None
        assert config.moe_aux_loss_coeff == 0.0 and not config.moe_router_enable_expert_bias
        assert callable(chunk.finish_grad_sync)
        raise ZeroDivisionError
    assert vars(config) == {**GIVEN, **GIVEN_BIAS} and vars(chunk) == {"config": config}


def test_squares_of_rows_that_float32_cannot_add(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("get_context_parallel_rank", "get_expert_data_parallel_rank"):
        monkeypatch.setattr(per_trajectory.mpu, name, lambda: 0)
    monkeypatch.setattr(per_trajectory, "param_is_not_tensor_parallel_duplicate", lambda parameter: True)
    weight = torch.nn.Linear(2, 2, bias=False)
    weight.weight.main_grad = torch.tensor([[3.0, 4.0], [3 * 2.0**-13, 4 * 2.0**-13]])  # type: ignore[attr-defined]
    dense, expert = per_trajectory._squared_norms([weight])
    assert float(dense) == 25 * (1 + 2.0**-26) and expert == 0.0
