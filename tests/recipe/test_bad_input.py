"""Bad input ends before a process starts: exit code 2, one line that names the setting and the fix."""

import json
from pathlib import Path

import pandas as pd
import pytest

from recipe.fully_async_policy import main
from recipe.fully_async_policy.validate import validate

GOOD_ROW = {
    "prompt": [{"role": "user", "content": "1 + 1"}],
    "data_source": "countdown",
    "reward_model": {"style": "rule", "ground_truth": "2"},
}


@pytest.fixture
def good(tmp_path: Path) -> dict[str, str]:
    """Overrides of a run that passes every check of ours."""
    pd.DataFrame([GOOD_ROW] * 16).to_parquet(tmp_path / "train.parquet")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    return {
        "+task": "countdown",
        "data.train_files": f"{tmp_path}/train.parquet",
        "data.val_files": f"{tmp_path}/train.parquet",
        "actor_rollout_ref.model.path": str(model),
        "run_dir": f"{tmp_path}/run",
    }


def run(overrides: dict[str, str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that the command prints on stderr."""
    code = main.main([f"{name}={value}" for name, value in overrides.items()])
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert code == 2
    assert len(errors) == 1
    assert not Path(overrides["run_dir"]).exists(), "a refused run must leave nothing behind"
    return errors[0]


@pytest.mark.parametrize(
    "setting, value, expected",
    [
        ("asinc.lag", "1", "asinc"),
        ("vcpo.truncate", "1", "truncate"),
        ("async.lag", "-1", "async.lag=-1: give a number of policy updates"),
        ("async.lag", "two", "async.lag=two: give a number of policy updates"),
        ("async.lag", "inf", "async.lag=inf: give a number of policy updates"),
        ("async.on_deadline", "drop", "async.on_deadline=drop: choose one of wait, reissue"),
        ("async.kv_cache", "drop", "async.kv_cache=drop: choose one of recompute, keep"),
        ("async.sampler_timeout_s", "0", "async.sampler_timeout_s=0: give a number of seconds"),
        ("async.weight_update_timeout_s", "0", "async.weight_update_timeout_s=0: give a number of seconds"),
        ("async.reward_timeout_s", "0", "async.reward_timeout_s=0: give a number of seconds"),
        ("async.reward_timeout_s", "inf", "async.reward_timeout_s=inf: give a number of seconds"),
        ("reward.custom_reward_function.path", "no.py", "reward.custom_reward_function.path=no.py: no such file"),
        ("actor_rollout_ref.model.lora_rank", "8", "actor_rollout_ref.model.lora_rank=8: LoRA is not supported"),
        ("actor_rollout_ref.model.lora.rank", "8", "actor_rollout_ref.model.lora.rank=8: LoRA is not supported"),
        (
            "actor_rollout_ref.model.lora.adapter_path",
            "adapter",
            "actor_rollout_ref.model.lora.adapter_path=adapter: LoRA is not supported",
        ),
        ("reward.reward_manager.name", "remote", "reward.reward_manager.name=remote: a custom reward function has"),
        ("async.exact_lag", "2", "async.exact_lag=2: give true or false"),
        ("vcpo.baseline", "best", "vcpo.baseline='best': choose one of"),
        ("vcpo.truncation", "-2", "vcpo.truncation=-2: give a number"),
        ("data.train_files", "nowhere.parquet", "data.train_files=nowhere.parquet: no such file"),
        ("actor_rollout_ref.model.path", "nowhere", "actor_rollout_ref.model.path=nowhere: no such folder"),
        (
            "actor_rollout_ref.rollout.n",
            "1",
            "actor_rollout_ref.rollout.n=1: vcpo.baseline=opob, vcpo.norm_by_std=True compare",
        ),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", "5", "ppo_mini_batch_size=5: does not divide"),
        (
            "data.train_batch_size",
            "32",
            "data.train_batch_size=32: data.train_files has 16 prompts, less than one batch",
        ),
        (
            "actor_rollout_ref.actor.checkpoint.async_save",
            "true",
            "async_save=true: the folder would be taken for whole",
        ),
        ("actor_rollout_ref.actor.shuffle", "true", "shuffle=true: it would split the samples of a prompt"),
        ("vcpo.opob_weights", "best", "vcpo.opob_weights='best': choose one of"),
        (
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
            "7",
            "ppo_micro_batch_size_per_gpu=7: does not divide",
        ),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", "2", "tensor_model_parallel_size=2: does not divide"),
        ("actor_rollout_ref.actor.use_kl_loss", "true", "use_kl_loss=True: VCPO's update has no such term"),
        ("algorithm.use_kl_in_reward", "true", "algorithm.use_kl_in_reward=true: VCPO's update uses raw rewards"),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps", "100", "lr_warmup_steps=100: the warm-up has to end before"),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio", "1", "lr_warmup_steps_ratio=1: give a share"),
        ("actor_rollout_ref.actor.loss_agg_mode", "token-mean", "loss_agg_mode='token-mean'"),
        ("actor_rollout_ref.rollout.top_p", "0.9", "rollout.top_p=0.9: the policy's log-probs are over all tokens"),
        ("actor_rollout_ref.rollout.top_k", "20", "rollout.top_k=20: the policy's log-probs are over all tokens"),
        ("actor_rollout_ref.rollout.temperature", "0", "rollout.temperature=0: the most likely token alone"),
        ("actor_rollout_ref.rollout.logprobs_mode", "raw_logits", "logprobs_mode=raw_logits: not of the distribution"),
        ("actor_rollout_ref.rollout.calculate_log_probs", "false", "calculate_log_probs=false: importance weights"),
    ],
)
def test_a_wrong_setting(
    good: dict[str, str], capsys: pytest.CaptureFixture[str], setting: str, value: str, expected: str
) -> None:
    assert expected in run({**good, setting: value}, capsys)


def test_a_batch_that_data_parallel_ranks_cannot_share(
    good: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    three_ranks = {"trainer.n_gpus_per_node": "3", "data.train_batch_size": "4"}
    assert "times rollout.n=8 is 32 sequences" in run({**good, **three_ranks}, capsys)


def test_virtual_stages_with_an_odd_number_of_micro_batches(
    good: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    megatron = "actor_rollout_ref.actor.megatron"
    stages = {
        "trainer.n_gpus_per_node": "2",
        f"{megatron}.pipeline_model_parallel_size": "2",
        f"{megatron}.virtual_pipeline_model_parallel_size": "2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "128",
    }
    assert "virtual pipeline stages need a multiple" in run({**good, **stages}, capsys)


def test_a_vocabulary_that_tensor_parallel_ranks_cannot_share(
    good: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(good["actor_rollout_ref.model.path"]) / "config.json"
    megatron = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size"
    four = {megatron: "4", "trainer.n_gpus_per_node": "4"}
    file.write_text(json.dumps({"model_type": "qwen2", "vocab_size": 62}))
    assert f"{megatron}=4: does not divide the 62 tokens of {file}; set it to a divisor" in run(
        {**good, **four}, capsys
    )
    file.write_text(json.dumps({"model_type": "qwen2", "vocab_size": 64}))
    validate(main.compose([f"{name}={value}" for name, value in {**good, **four}.items()]))


def test_log_probs_before_the_temperature(good: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    rollout = "actor_rollout_ref.rollout"
    raw = {f"{rollout}.logprobs_mode": "raw_logprobs", f"{rollout}.temperature": "0.7"}
    expected = f"{rollout}.logprobs_mode=raw_logprobs: not of the distribution sampled at temperature=0.7"
    assert expected in run({**good, **raw}, capsys)


def test_sampling_that_keeps_the_log_probs_and_validation_are_free(good: dict[str, str]) -> None:
    rollout = "actor_rollout_ref.rollout"
    for free in (
        {"temperature": "0.7"},
        {"temperature": "1.0", "logprobs_mode": "raw_logprobs"},
        {"val_kwargs.temperature": "0", "val_kwargs.top_p": "0.9", "val_kwargs.top_k": "20"},
    ):
        settings = {**good, **{f"{rollout}.{name}": value for name, value in free.items()}}
        validate(main.compose([f"{name}={value}" for name, value in settings.items()]))


def test_a_kept_cache_that_is_freed(good: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    kept = {"async.kv_cache": "keep", "actor_rollout_ref.rollout.free_cache_engine": "true"}
    assert "free_cache_engine=true frees the cache" in run({**good, **kept}, capsys)


def test_lags_that_contradict_each_other(good: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    synchronous = {"async.lag": "0", "async.on_deadline": "reissue"}
    assert "async.on_deadline=reissue: at async.lag=0" in run({**good, **synchronous}, capsys)
    fraction = {"async.lag": "0.5", "async.exact_lag": "true"}
    assert "async.exact_lag=true: needs a whole async.lag" in run({**good, **fraction}, capsys)


def test_a_loss_that_hides_the_scores(good: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    per_token = {"+actor_rollout_ref.actor.megatron.override_transformer_config.calculate_per_token_loss": "true"}
    assert "calculate_per_token_loss=true" in run({**good, **per_token}, capsys)
    norm = {"actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-sum-norm"}
    assert "loss_scale_factor=None" in run({**good, **norm}, capsys)


@pytest.mark.parametrize("column", sorted(GOOD_ROW))
def test_a_missing_column(good: dict[str, str], capsys: pytest.CaptureFixture[str], column: str) -> None:
    file = good["data.train_files"]
    pd.DataFrame([{k: v for k, v in GOOD_ROW.items() if k != column}]).to_parquet(file)
    assert f"column {column!r} is missing" in run(good, capsys)


def test_an_empty_and_an_unreadable_parquet(good: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    file = good["data.train_files"]
    pd.DataFrame([GOOD_ROW]).head(0).to_parquet(file)
    assert "holds no rows" in run(good, capsys)
    Path(file).write_text("not a parquet file")
    assert "not a readable parquet file" in run(good, capsys)


def test_help_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["--help"])
    assert ended.value.code == 0
    assert "python -m recipe.fully_async_policy.main +task=countdown" in capsys.readouterr().out
