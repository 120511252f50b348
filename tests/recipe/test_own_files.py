"""A user's own files: a slip is refused in one line with file and line, and what is right goes through."""

import copy
import functools
from pathlib import Path

import pytest
from omegaconf import DictConfig

from recipe.fully_async_policy import main
from recipe.fully_async_policy.settings import other_names
from recipe.fully_async_policy.settings.method import names as methods
from tests.recipe.refused import hydras_compose

HEADER = "# @package _global_\n"
DEFAULTS = "defaults:\n  - /scale: ${oc.env:VCPO_HARDWARE}\n  - _self_\n"
DATA = "data:\n  train_files: train.parquet\n  val_files: val.parquet\n"
GOOD = HEADER + DEFAULTS + DATA  # seven lines


def below(path: str, setting: str) -> str:
    """YAML of a setting, after GOOD; its line is the last."""
    lines = [*path.split("."), setting] if path else [setting]
    return "".join(
        f"{'  ' * depth}{line}{'' if line == setting else ':'}\n" for depth, line in enumerate(filter(None, lines))
    )


ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
# kind -> (preset, place and words of the refusal)
WRONG = {
    "misspelt": [
        (GOOD.replace("val_files", "val_file"), ":7: data.val_file: there is no such setting; did you mean data.val_f"),
        (GOOD + "  max_promt_length: 32\n", ":8: data.max_promt_length: there is no such setting; did you mean data.m"),
        (GOOD + below("vcpo.norms", "kep: auto"), ":10: vcpo.norms.kep: there is no such setting"),
        (GOOD + below(f"{ACTOR}.optim", "learning_rate: 1e-4"), f"did you mean {ACTOR}.optim.lr?"),
        (GOOD + below(f"{ACTOR}.megatron.override_transformer_config", "recompute_granularty: full"), "did you mean r"),
        (GOOD + below(f"{ROLLOUT}.engine_kwargs.vllm", "enforce_eagr: true"), "did you mean enforce_eager?"),
        (GOOD + below("ray_kwargs.ray_init", "num_cpu: 2"), ":10: ray_kwargs.ray_init.num_cpu: ray.init has no such s"),
    ],
    "wrong level": [
        (GOOD + below("optim", "lr: 1e-3"), f":8: optim: there is no such setting; did you mean {ACTOR}.optim?"),
        (GOOD + below("", "train_batch_size: 8"), ":8: train_batch_size: there is no such setting; did you mean data."),
        (GOOD + below("actor_rollout_ref", "lr: 1e-3"), f"did you mean {ACTOR}.optim.lr?"),
        (GOOD + below("reward_model", "enable: true"), ":9: reward_model.enable: nothing reads it; leave it out"),
        (GOOD + "trainer: 5\n", ":8: trainer=5: is a section of settings, and no value"),
        (GOOD + below("data.x", "a: 1").removeprefix("data:\n"), ":8: data.x: there is no such setting"),
        (GOOD + "  seed:\n    of: 1\n", ":9: data.seed.of: data.seed is one value, 1, and no section of settings"),
    ],
    "no preset": [
        (GOOD + "x: [unclosed\n", ":9: no YAML: expected ',' or ']'"),
        (GOOD + "trainer:\n\ttest_freq: 5\n", ":9: a tab; YAML indents with spaces"),
        (GOOD + "trainer: test_freq: 5\n", ":8: no YAML: mapping values are not allowed here"),
        (GOOD + "trainer:\n  test_freq: 5\n save_freq: 5\n", ":10: no YAML: "),
        (GOOD + 'run_dir: "unclosed\n', ":9: no YAML: found unexpected end of stream"),
        (GOOD + DATA, ":8: no YAML: found duplicate key data; mend the line"),
        (GOOD + "  seed: ???\n", ":8: data.seed: ??? is no value"),
        ("", ":1: the first line has to be `# @package _global_`"),
        (HEADER, "mine.yaml: has no settings"),
        ("- data\n- trainer\n", ":1: the first line has to be `# @package _global_`"),
        (HEADER + "hello\n", "mine.yaml: has no settings; write `name: value`, without a dash"),
        ("data: é\n".encode("latin-1"), "mine.yaml: is not text in UTF-8"),
        (DEFAULTS + DATA, ":1: the first line has to be `# @package _global_`"),
        (GOOD.replace("@package", "package"), ":1: the first line has to be `# @package _global_`"),
        ("# of mine\n" + GOOD.replace("@package", "@packge"), ":1: the first line has to be `# @package _global_`"),
        (GOOD.replace("# @package _global_", "# @package"), "got '@package': Hydra reads a comment with @ as an order"),
        ("# Of mine.\n" + GOOD, ":1: the first line has to be `# @package _global_`"),
        ("# @anna made this\n" + GOOD, "'@anna made this': Hydra reads a comment with @ as an order; leave the @ out"),
        (GOOD.replace("defaults", "# @anna made this\ndefaults"), "'@anna made this': Hydra reads a comment"),
        (HEADER + DEFAULTS + "trainer:\n  test_freq: 5\n", "data.train_files: +task=mine does not set it; the preset"),
        (GOOD.replace("  val_files: val.parquet\n", ""), "data.val_files: not given; give a file, in the preset or"),
        (HEADER + DATA, "actor_rollout_ref.model.path=null: give the folder of a Hugging Face model"),
        (GOOD + "method: none\n", ":8: `method:` would change the name alone; give method=NAME on the command line"),
    ],
    "defaults": [
        (GOOD.replace("/scale", "/scal"), "mine.yaml: there is no scal/cpu.yaml among the presets"),
        (GOOD.replace("${oc.env:VCPO_HARDWARE}", "gpuu"), "mine.yaml: there is no scale/gpuu.yaml among the prese"),
        (GOOD.replace("/scale: ${oc.env:VCPO_HARDWARE}", "cuntdown"), "did you mean countdown?"),
        (GOOD.replace(DEFAULTS, "defaults: /scale\n"), "'task/mine', defaults must be a list"),
        (GOOD.replace("  - _self_", "  - override /method: magic\n  - _self_"), "method=magic: there is no such"),
        (GOOD.replace("  - _self_", "  - override /method: vcpo_minibach\n  - _self_"), "did you mean vcpo_minibatch?"),
        (GOOD.replace("  - _self_", "  - tool_use\n  - _self_"), "scale: two presets choose one, `/scale: ...` of the"),
        (GOOD.replace("  - _self_", "  - more: x\n  - _self_"), "mine.yaml: there is no task/more/x.yaml among the"),
    ],
    "type": [
        (GOOD + below(f"{ACTOR}.optim", "lr: fast"), f":11: {ACTOR}.optim.lr=fast: give"),
        (GOOD + below(f"{ACTOR}.optim", "lr_warmup_init: none"), f":11: {ACTOR}.optim.lr_warmup_init=none: give a num"),
        (GOOD + below(ACTOR, "shuffle: 7"), f":10: {ACTOR}.shuffle=7: give true or false"),
        (GOOD + below(ACTOR, "ppo_max_token_len_per_gpu: '64'"), ":10: "),
        (GOOD + below(f"{ACTOR}.megatron", "tensor_model_parallel_size: two"), ":11: "),
        (GOOD + below("trainer", "test_freq: ${nothing.here}"), ":9: trainer.test_freq: Interpolation key 'nothing.he"),
        (GOOD + below("async", "lag: soon"), ":9: async.lag=soon: give a number of policy updates"),
        (GOOD + "  shares: [0.7, x]\n", ":8: data.shares=[0.7, 'x']: give a share above 0 of each train file"),
    ],
}  # fmt: skip
RIGHT = {
    "the guide's": GOOD,
    "without _self_": GOOD.replace("  - _self_\n", ""),
    "without a scale": HEADER + DATA + below("actor_rollout_ref.model", "path: models/mine"),
    "another preset's settings": GOOD.replace("/scale: ${oc.env:VCPO_HARDWARE}", "tool_use"),
    "another method": GOOD.replace("  - _self_", "  - override /method: vcpo_minibatch\n  - _self_"),
    "flow style": HEADER + DEFAULTS + "data: {train_files: [a.parquet, b.parquet], val_files: val.parquet}\n",
    "two files and their shares": GOOD.replace("train.parquet", "[a.parquet, b.parquet]") + "  shares: [0.7, 0.3]\n",
    "a reference": GOOD + "trainer:\n  save_freq: ${trainer.test_freq}\n",
    "null": GOOD + "  train_max_samples: -1\n  val_batch_size: null\n",
    "vcpo": GOOD + "vcpo:\n  truncation: 4\n  norms:\n    how: two_backwards\n",
    "arguments of the reward": GOOD + below("reward.custom_reward_function.reward_kwargs", "worth: 2"),
    "Megatron's": GOOD + below(f"{ACTOR}.megatron.override_transformer_config", "attention_softmax_in_fp32: true"),
    "vLLM's": GOOD + below(f"{ROLLOUT}.engine_kwargs.vllm", "max_logprobs: 5"),
    "Ray's": GOOD + below("ray_kwargs.ray_init", "include_dashboard: false"),
    "of the model": GOOD + below("actor_rollout_ref.model.override_config", "attention_dropout: 0.0"),
    "a field of verl's class": GOOD + below(ROLLOUT, "expert_parallel_size: 1"),
    "what verl reads unlisted": GOOD + "  gen_batch_size: 16\n",
}  # fmt: skip
WRITTEN = [(kind, *case) for kind, cases in WRONG.items() for case in cases]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's own configuration is composed once: Hydra takes a third of a second."""
    once = functools.cache(lambda overrides: hydras_compose(list(overrides)))

    def compose(overrides: list[str], folder: Path | None = None) -> DictConfig:
        return hydras_compose(overrides, folder) if folder else copy.deepcopy(once(tuple(overrides)))

    monkeypatch.setattr(main, "compose_unchecked", compose)


def dry_run(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> list[str]:
    """The lines of the refusal; none where there is none."""
    code = main.main([*more, "--config-dir", str(folder), "hardware=cpu", "--dry-run"])
    lines = capsys.readouterr().err.splitlines()
    assert code == (2 if lines else 0)
    assert all(line.startswith("error: ") for line in lines)
    return lines


def preset(tmp_path: Path, text: str | bytes, group: str = "task") -> Path:
    (tmp_path / group).mkdir()
    (tmp_path / group / "mine.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    return tmp_path


IDS = [f"{kind} {n}" for n, (kind, *_) in enumerate(WRITTEN)]


@pytest.mark.parametrize(("kind", "text", "words"), WRITTEN, ids=IDS)
def test_a_slip_is_refused(
    kind: str, text: str | bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line, *others = dry_run(preset(tmp_path, text), capsys, "+task=mine")
    assert words in line
    assert others == []
    assert "+task=NAME" not in line
    if words.startswith(":"):
        assert line.startswith(f"error: {tmp_path}/task/mine.yaml{words.partition(' ')[0]}")


@pytest.mark.parametrize("text", RIGHT.values(), ids=RIGHT)
def test_what_is_right_goes_through(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(preset(tmp_path, text), capsys, "+task=mine") == []


def test_all_slips_are_said_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slips = "".join(f"  slip_{n}: 1\n" for n in range(3))
    lines = dry_run(preset(tmp_path, GOOD + slips), capsys, "+task=mine", "+async.lagg=3")
    assert [line.partition(": there")[0].rpartition("/")[2] for line in lines] == [
        *(f"mine.yaml:{8 + n}: data.slip_{n}" for n in range(3)),
        "error: +async.lagg=3",
    ]
    sizes = "  max_prompt_length: 0\n  train_max_samples: x\n" + below(f"{ACTOR}.optim", "lr: -1")
    (tmp_path / "task/mine.yaml").write_text(GOOD + sizes)
    assert len(dry_run(tmp_path, capsys, "+task=mine", "async.lag=-1")) == 4
    (tmp_path / "task/mine.yaml").write_text(GOOD + "".join(f"  slip_{n}: 1\n" for n in range(30)))
    lines = dry_run(tmp_path, capsys, "+task=mine")
    assert len(lines) == 30


OF_METHOD = HEADER + "method: mine\nvcpo:\n  enable: true\n  baseline: mean\n"
OF_LOSS = OF_METHOD.replace("true", "false") + below(f"{ACTOR}.policy_loss", "loss_mode: none.py:f")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (OF_METHOD, ""),
        (OF_METHOD.replace("baseline", "base_line"), "mine.yaml:5: vcpo.base_line: there is no such setting; did you"),
        (OF_METHOD.replace("method: mine\n", ""), "mine.yaml:1: the method's name is missing; add the line `method: m"),
        (OF_METHOD.replace(HEADER, ""), "mine.yaml:1: the first line has to be `# @package _global_`"),
        (OF_METHOD.replace("mean", "average"), "vcpo.baseline='average': choose one of"),
        (OF_METHOD.replace("true", "perhaps"), "vcpo.enable"),
        (OF_LOSS, f"mine.yaml:9: {ACTOR}.policy_loss.loss_mode="),
        (OF_LOSS.replace("none.py:f", "gsop"), f"mine.yaml:9: {ACTOR}.policy_loss.loss_mode=gsop: did you mean gspo?"),
        (OF_METHOD + "  enable: false\n", "mine.yaml:6: no YAML: found duplicate key enable"),
        (OF_METHOD + below(f"{ACTOR}.policy_loss", "loss_mod: gspo"), f"mine.yaml:9: {ACTOR}.policy_loss.loss_mod: th"),
        ("", "mine.yaml:1: the first line has to be"),
        (OF_METHOD + "x: {\n", "mine.yaml:7: no YAML"),
        (OF_METHOD + "algoritm:\n  gamma: 1\n", "mine.yaml:6: algoritm: there is no such setting; did you mean algori"),
    ],
)  # fmt: skip
def test_a_method_of_ones_own(text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = dry_run(preset(tmp_path, text, "method"), capsys, "+task=countdown", "method=mine")
    assert (lines == []) if not words else (len(lines) == 1 and words in lines[0])


@pytest.mark.parametrize("place", ["mine.yaml", "mine.yml", "task/mine.yml"])
def test_a_preset_in_another_place(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text(GOOD)
    (line,) = dry_run(tmp_path, capsys, "+task=mine")
    assert "+task=mine: there is no such task" in line
    assert line.endswith(f"; one of your own is {tmp_path}/task/mine.yaml")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("+trainer.total_trainig_steps=9", "did you mean trainer.total_training_steps?"),
        ("++data.max_promt_length=9", "did you mean data.max_prompt_length?"),
        ("+optim.lr=1e-3", f"did you mean {ACTOR}.optim.lr?"),
        (f"+{ACTOR}.optim.learning_rate=1e-3", f"did you mean {ACTOR}.optim.lr?"),
        ("+anything=3", "+anything=3: there is no such setting"),
        ("+data={max_promt_length:9}", "did you mean data.max_prompt_length?"),
        (f"+{ROLLOUT}.kv_cache_dtype=fp8", f"an option of vLLM is +{ROLLOUT}.engine_kwargs.vllm.kv_cache_dtype=fp8"),
        (f"++{ROLLOUT}.engine_kwargs.vllm.enforce_eagr=true", "did you mean enforce_eager?"),
        ("++async.lag.of=3", "async.lag"),
        ("++trainer.test_freq=7", ""),
        ("++reward.custom_reward_function.reward_kwargs.worth=1", ""),
        (f"+{ACTOR}.megatron.override_transformer_config.attention_softmax_in_fp32=true", ""),
        (f"++{ROLLOUT}.engine_kwargs.vllm.num_gpu_blocks_override=64", ""),
    ],
)
def test_names_that_the_command_line_adds(
    override: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = dry_run(tmp_path, capsys, "+task=countdown", override)
    assert (lines == []) if not words else (len(lines) == 1 and words in lines[0])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        *[("grpo", "method=none"), ("GRPO", "method=none"), ("rloo", "adv_estimator=rloo"), ("VCPO", "method=vcpo")],
        *[("Vcpo", "method=vcpo"), ("vcpo-minibatch", "method=vcpo_minibatch"), ("REINFORCE", "method=none")],
        *[("tis", "tis_seq"), ("opob", "vcpo_opob"), ("dapo", "method=ppo"), ("dr-grpo", "norm_adv_by_std_in_grpo")],
        *[("gsop", "mean gspo"), ("vcpo_minibach", "mean vcpo_minibatch"), ("magic", "methods.md has all")],
        *[("PPO", "method=ppo"), ("reinforce++", "reinforce_plus_plus")],
    ],
)  # fmt: skip
def test_what_people_call_methods(given: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = dry_run(tmp_path, capsys, "+task=countdown", f"method={given}")
    assert line.startswith(f"error: method={given}: ")
    assert words in line and len(line.replace(str(tmp_path), "")) < 180


def test_the_answers_name_methods_that_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for answer in other_names.METHODS.values():
        words = answer.replace(",", " ").split()
        settings = [word for word in words if "=" in word]
        assert next(word for word in settings if word.startswith("method=")).removeprefix("method=") in methods()
        assert dry_run(tmp_path, capsys, "+task=countdown", *settings) == []
