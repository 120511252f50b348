"""DRY_RUN: the plan is printed, nothing starts, and a layout that cannot start is refused with the fix."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from transformers import Qwen3MoeConfig

from recipe.fully_async_policy import main
from recipe.fully_async_policy.plan import gpu_memory, gpu_plan, model_shape, step_time
from recipe.fully_async_policy.plan.gpu_memory import Layout
from recipe.fully_async_policy.plan.gpu_plan import norms_line

MEGATRON, ROLLOUT = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.rollout"
ACTOR_SEQUENCES = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
ACTOR_TOKENS = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
DYNAMIC = "actor_rollout_ref.actor.use_dynamic_bsz"
RECOMPUTE = f"{MEGATRON}.override_transformer_config.recompute_granularity"
MATH = {
    "+task": "math",
    "method": "vcpo",
    "hardware": "gpu",
    "async.lag": "10",
    "trainer.n_gpus_per_node": "4",
    f"{MEGATRON}.tensor_model_parallel_size": "4",
    f"{ROLLOUT}.n_gpus_per_node": "4",
    f"{ROLLOUT}.tensor_model_parallel_size": "2",
}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restored afterwards: the command sets it."""
    monkeypatch.setenv("VCPO_HARDWARE", "gpu")
    monkeypatch.setenv("VCPO_RUN_ID", "test")
    monkeypatch.setenv("DRY_RUN", "1")


def dry_run(tmp_path: Path, settings: dict[str, str], *options: str) -> int:
    given = {**MATH, **settings, "run_dir": f"{tmp_path}/run"}
    code = main.main([*(f"{name}={value}" for name, value in given.items()), *options])
    assert not (tmp_path / "run").exists()
    return code


def test_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(tmp_path, {}) == 0
    printed = capsys.readouterr().out
    for expected in (
        "async.lag",
        "GPU 0-3 │ trainer: TP 4 x PP 1 x CP 1 x DP 1",
        "GPU 4-5 │ sampler 1: TP 2",
        "GPU 6-7 │ sampler 2: TP 2",
        "7.62 billion parameters",
        "KV cache",
        "nothing was started",
    ):
        assert expected in printed


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {},
            "packed, on the layers of Transformer Engine, where that is installed, else Megatron's own; a second "
            "backward forms the gradient where groups, ranks or weights demand one (actor/vcpo/second_backwards). "
            "The trainer",
        ),
        (
            {f"+{MEGATRON}.override_transformer_config.transformer_impl": "local"},
            "Gradient norms: packed, on Megatron's own layers (transformer_impl=local); a second",
        ),
        ({f"+{MEGATRON}.override_transformer_config.fp8": "e4m3"}, "not packed, because fp8 is not supported."),
        ({"vcpo.norms.how": "per_trajectory"}, "one backward per sequence (vcpo.norms.how=per_trajectory)"),
    ],
    ids=str,
)
def test_how_norms_will_be_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, str], expected: str
) -> None:
    """Catches a plan that leaves a reader in doubt about the layers, and about a fallback that costs twice the time."""
    assert dry_run(tmp_path, settings) == 0
    assert expected in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "gradient (a mixture of experts). The trainer checks its experts' settings and layers"),
        ({"transformer_impl": "local"}, "on Megatron's own layers (transformer_impl=local); a second backward forms"),
        ({"moe_z_loss_coeff": 0.001}, "not packed, because moe_z_loss_coeff=0.001: the loss is no sequence's own."),
    ],
    ids=str,
)
def test_a_mixture_of_experts_is_told(tmp_path: Path, settings: dict[str, Any], expected: str) -> None:
    """Catches a plan that promises packed norms where the trainer will fall back."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_experts": 8}))
    config = OmegaConf.create(
        {
            "vcpo": {},
            "actor_rollout_ref": {
                "model": {"path": str(tmp_path)},
                "actor": {"megatron": {"override_transformer_config": settings}},
            },
        }
    )
    assert expected in (norms_line(config) or "")


def test_the_plan_of_a_mixture_of_experts_has_no_second_buffer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a plan in which vcpo.norms.how=packed means for experts what it means for dense models."""
    model = Qwen3MoeConfig(num_hidden_layers=4, num_experts=8, num_key_value_heads=4, vocab_size=32000)
    model.save_pretrained(tmp_path / "model")
    settings = {"actor_rollout_ref.model.path": str(tmp_path / "model"), f"{MEGATRON}.expert_model_parallel_size": "4"}
    settings[f"{MEGATRON}.expert_tensor_parallel_size"] = "1"
    assert dry_run(tmp_path, settings) == 0
    assert "second buffer" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # the published tool-use layout
        (
            {"trainer.n_gpus_per_node": "2"},
            "trainer.n_gpus_per_node=2: 2 devices (x nnodes) are no multiple of tensor x pipeline x context parallel",
        ),
        ({f"{ROLLOUT}.n_gpus_per_node": "3"}, "tensor_model_parallel_size=2: does not divide the 3 sampler devices"),
        (
            {f"{MEGATRON}.tensor_model_parallel_size": "2", "data.train_batch_size": "3", f"{ROLLOUT}.n": "3"},
            "is 9 seq",
        ),
        ({ACTOR_SEQUENCES: "7", DYNAMIC: "false"}, "ppo_micro_batch_size_per_gpu=7: does not div"),
        ({ACTOR_SEQUENCES: "4"}, "ppo_micro_batch_size_per_gpu=4: has no effect"),
        ({"data.max_response_length": "12000"}, "of full length has 13024 tokens (data.max_prompt_length + data"),
        (
            {"trainer.n_gpus_per_node": "6", f"{MEGATRON}.tensor_model_parallel_size": "6"},
            "tensor_model_parallel_size=6: does not divide the model's 28 attention heads (4 of keys and values); set "
            "it to 4",
        ),
        (
            {"trainer.n_gpus_per_node": "1", f"{MEGATRON}.tensor_model_parallel_size": "1"},
            "GiB on each trainer GPU, which has 79.6; set trainer.n_gpus_per_node=",
        ),
        ({f"{MEGATRON}.expert_model_parallel_size": "4"}, "expert_model_parallel_size=4: with expert_tensor_par"),
        ({f"{MEGATRON}.tensor_model_parallel_size": "0"}, "parallel_size=0: give a whole number of at least 1"),
        ({RECOMPUTE: "full"}, f"{RECOMPUTE}=full: needs {MEGATRON}.override_transformer_config.recompute_method=uni"),
        ({f"{ROLLOUT}.gpu_memory_utilization": "0.1"}, "gpu_memory_utilization: leaves 0.0 GiB for the KV cache"),
    ],
)
def test_a_layout_that_cannot_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, str], expected: str
) -> None:
    assert dry_run(tmp_path, settings) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert expected in errors[0]


def test_a_model_of_another_kind_is_not_estimated(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}))
    assert model_shape.read_shape(str(tmp_path)) is None


def test_parts_that_fill_several_nodes() -> None:
    layout = Layout(trainer_gpus=16, trainer_nodes=2, tp=4, pp=1, cp=1, sampler_gpus=12, sampler_tp=4)
    assert [gpus for gpus, _ in gpu_plan.place(layout)] == [
        "node 1, GPU 0-7",
        "node 2, GPU 0-7",
        "node 3, GPU 0-3",
        "node 3, GPU 4-7",
        "node 4, GPU 0-3",
    ]


def test_memory_of_a_layout() -> None:
    """By hand: 4 billion parameters' worth of bytes, split."""
    shape = model_shape.KNOWN_SHAPES["Qwen2.5-7B"]
    config = main.compose([f"{name}={value}" for name, value in MATH.items()])
    two_ranks = Layout(trainer_gpus=8, trainer_nodes=1, tp=4, pp=1, cp=1, sampler_gpus=4, sampler_tp=2)
    memory = gpu_memory.trainer_memory(config, two_ranks, shape).backward
    share = 7_615_616_512 / 4 / 2**30
    assert memory["weights"] == pytest.approx(2 * share)
    assert memory["gradients"] == pytest.approx(4 * share)
    assert memory["optimizer"] == pytest.approx(6 * share)
    assert not {"critic", "reference policy"} & set(memory)
    config.critic.enable = config.algorithm.use_kl_in_reward = True
    more = gpu_memory.trainer_memory(config, two_ranks, shape).backward
    assert (more["critic"], more["reference policy"]) == (pytest.approx(12 * share), pytest.approx(2 * share))
    # 28 layers x 2 of 4 key-value heads x 128 x (keys + values) x 2 bytes
    assert gpu_memory.kv_tokens(two_ranks, shape, 28 * 2 * 128 * 4 * 1000 / 2**30) == 1000


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "ppo_max_token_len_per_gpu=12288"),
        ({ACTOR_SEQUENCES: "8", DYNAMIC: "false"}, "ppo_micro_batch_size_per_gpu=4"),
        ({ACTOR_TOKENS: "3072", "gpu_memory_gib": "50"}, "recompute_granularity=full"),
        ({ACTOR_SEQUENCES: "1", DYNAMIC: "false", "gpu_memory_gib": "50"}, "recompute_granularity=full"),
    ],
    ids=str,
)
def test_what_fits_only_shorter_sequences_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, str], expected: str
) -> None:
    """Catches a launch that is refused although typical responses fit, and one that is not told of the longest."""
    given = {ACTOR_TOKENS: "24576"} if DYNAMIC not in settings else {}
    given |= settings
    assert dry_run(tmp_path, given) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Warning: a micro-batch in which all sequences have the full length needs" in printed
    assert expected in printed.replace(" ", "") or expected in printed


def test_the_optimizers_state_moves_to_the_host_but_for_its_step() -> None:
    shape = model_shape.KNOWN_SHAPES["Qwen2.5-7B"]
    config = main.compose([f"{name}={value}" for name, value in MATH.items()])
    layout = gpu_memory.read_layout(config)
    here = gpu_memory.trainer_memory(config, layout, shape)
    config.actor_rollout_ref.actor.megatron.optimizer_offload = True
    moved = gpu_memory.trainer_memory(config, layout, shape)
    gone = here.step.keys() - moved.step.keys()
    assert moved.step == {use: gib for use, gib in here.step.items() if use not in gone}
    assert gone == {gpu_memory.SECOND_BUFFER}, "the second buffer is freed before the optimizer's state comes back"
    assert sum(here.backward.values()) - sum(moved.backward.values()) == pytest.approx(here.step["optimizer"])


def test_pipeline_stages() -> None:
    """The first stage keeps the activations of as many micro-batches as there are stages; the last has the logits."""
    shape = model_shape.KNOWN_SHAPES["Qwen2.5-7B"]
    config = main.compose([f"{name}={value}" for name, value in MATH.items()])
    one, two = (Layout(4, 1, 4 // pp, pp, 1, 4, 2, etp=1) for pp in (1, 2))
    first = gpu_memory._stage_memory(config, two, shape, True, False).backward
    last = gpu_memory._stage_memory(config, two, shape, False, True).backward
    whole = gpu_memory.trainer_memory(config, one, shape).backward
    assert first["activations"] == pytest.approx(2 * whole["activations"], rel=0.03)  # TP 2 instead of 4
    assert last["activations"] == pytest.approx(whole["activations"], rel=0.03)
    assert last["logits"] == pytest.approx(2 * whole["logits"]) and "logits" not in first


def test_the_plan_ends_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whether it fits, and what is not here."""
    assert dry_run(tmp_path, {}) == 0
    printed = " ".join(capsys.readouterr().out.split())
    memory = re.search(r"It fits: the trainer needs ([\d.]+) GiB of a GPU at most, a sampler ([\d.]+)\.", printed)
    assert memory and all(0 < float(gib) < 79.6 for gib in memory.groups())
    missing = "Not on this machine: Qwen/Qwen2.5-7B, data/math/train.parquet, data/math/val.parquet, 8 GPUs (0 here)."
    assert missing in printed


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"actor_rollout_ref.model.path": "a/b"}, "hf download a/b config.json --local-dir models/b, then"),
        ({f"{ROLLOUT}.max_num_seqs": "4096"}, "(actor_rollout_ref.rollout.max_num_seqs): no error if more are that"),
        ({f"{ROLLOUT}.max_num_seqs": "8"}, "It runs 8 (actor_rollout_ref.rollout.max_num_seqs)."),
    ],
)
def test_the_plan_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, str], expected: str
) -> None:
    assert dry_run(tmp_path, settings) == 0
    assert expected in " ".join(capsys.readouterr().out.split())


def test_what_is_here_is_not_called_missing(tmp_path: Path) -> None:
    config = main.compose([f"{name}={value}" for name, value in MATH.items()])
    config.actor_rollout_ref.model.path = config.data.train_files = str(tmp_path)
    config.data.val_files = [str(tmp_path), f"{tmp_path}/none.parquet"]
    config.ray_kwargs.ray_init.address = "10.0.0.1:6379"
    assert gpu_plan.missing_here(config) == [f"{tmp_path}/none.parquet"]


@pytest.mark.parametrize("lag", [0, 0.25, 0.5, 1, 8])
def test_a_fraction_of_a_batch_is_sampled_while_the_trainer_works(lag: float) -> None:
    assert step_time.StepTime(6.0, 6.0, 1.0, 1, lag).step_s == 13 - 6 * min(1, lag)
    assert step_time.StepTime(4.0, 8.0, 1.0, 1, lag).step_s == max(9, 13 - 8 * lag)


RUN_STEP = {
    "step_s": 9.5,
    "trainer_idle_share": 0.2,
    "sampler_idle_share": 0.3,
    "weight_sync_s": 0.5,
    "perf/total_num_tokens": 1000,
}


def run_folder(folder: Path, steps: int = 8, **changed: Any) -> Path:
    """An earlier run of MATH: steps of 10 s, and one of 100 s, with a validation."""
    folder.mkdir()
    OmegaConf.save(main.compose([f"{name}={value}" for name, value in MATH.items()]), folder / "config.yaml")
    lines = [{"step": 0, "wall_clock_s": 20}]
    for step in range(1, steps + 1):
        lines.append({"step": step, "wall_clock_s": 20 + 10 * step + 90 * (step > 5), **RUN_STEP, **changed})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def change(run: Path, setting: str, value: Any) -> None:
    """Give an earlier run another setting."""
    config = OmegaConf.load(run / "config.yaml")
    OmegaConf.update(config, setting, value)
    OmegaConf.save(config, run / "config.yaml")


def test_a_forecast_scales_the_rates_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: the trainer works 10 - 0.2 * 9.5 - 0.5 s of a step, a sampler 0.7 of it; twice the responses are drawn,
    and trained on by twice the GPUs."""
    run = run_folder(tmp_path / "earlier")
    settings = {f"{ROLLOUT}.n": "32", "trainer.n_gpus_per_node": "8"}
    assert dry_run(tmp_path, settings, "--forecast", str(run)) == 0
    printed = capsys.readouterr().out.splitlines()[-3:]
    assert printed[0] == f"Time, by 6 steps of {run}: 14.5 s a step, 2 h 00 min for 500 steps."
    said = "the samplers need 14.0 s for the 2,000 tokens of a step; the trainer needs 7.6 s, 46% less."
    assert printed[1] == f"What binds: {said}" and printed[2].startswith("Assumed: ")


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda run: (run / "metrics.jsonl").unlink(), "give a run's folder (run_dir): metrics.jsonl, config.yaml"),
        (lambda run: (run / "config.yaml").write_text("a: ["), "give a run's folder (run_dir)"),
        (lambda run: (run / "config.yaml").write_text("- 1"), "give a run's folder (run_dir)"),
        (lambda run: (run / "config.yaml").write_text("trainer: {nnodes: 1}"), "give a run's folder (run_dir)"),
        ({"steps": 5}, "5 steps; a forecast needs 6 or more"),
        ({"sampler_idle_share": None}, "its metrics.jsonl has no sampler_idle_share; give a run of this version"),
        *(
            (lambda run, setting=setting, value=value: change(run, setting, value), f"is not comparable: {expected}")
            for setting, value, expected in (
                ("trainer.device", "cpu", "trainer.device=cpu (here cuda); a forecast needs a short run of this plan"),
                ("actor_rollout_ref.model.path", "models/tiny", "actor_rollout_ref.model.path=models/tiny (here Qwen"),
                ("gpu_memory_gib", 139, "gpu_memory_gib=139 (here 79.6)"),
                (f"{MEGATRON}.tensor_model_parallel_size", 2, f"{MEGATRON}.tensor_model_parallel_size=2 (here 4)"),
                ("data.max_response_length", 32, "data.max_response_length=32 (here "),
                (f"{ROLLOUT}.n", 2, "16 responses a step for each trainer GPU (here 128)"),
                ("method", "none", "method=none (here vcpo)"),
            )
        ),
    ],
)
def test_what_gives_no_forecast_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Any, expected: str
) -> None:
    run = run_folder(tmp_path / "earlier", **({} if callable(spoil) else spoil))
    if callable(spoil):
        spoil(run)
    assert dry_run(tmp_path, {}, "--forecast", str(run)) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --forecast {run}: ") and expected in error and error.count("\n") == 1
