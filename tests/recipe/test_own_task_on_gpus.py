"""docs/guide/cluster.md, "Your model": its rows, its preset, and the plan of every line of its table."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from transformers import PretrainedConfig, Qwen2Config, Qwen3Config

from recipe.fully_async_policy import main
from recipe.fully_async_policy.plan.devices import check_gpus
from recipe.fully_async_policy.settings.errors import SettingError
from recipe.tasks.countdown.problems import Difficulty
from recipe.warm_start.tokenizer import train_tokenizer
from scripts import prepare_data
from tests.kit import ROOT

SECTION = (ROOT / "docs/guide/cluster.md").read_text().split("## Your model\n")[1].split("## Several nodes\n")[0]
ROWS = re.findall(r"^\| (\d+) \| (\S+) \| (?:`(.*)`)? *\| ([\d.]+) \| ([\d.]+) \|$", SECTION, re.MULTILINE)
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SIZES = (
    *("data.max_prompt_length", "data.max_response_length", "data.train_batch_size", "trainer.n_gpus_per_node"),
    *(f"{_ACTOR}.use_dynamic_bsz", f"{_ACTOR}.ppo_max_token_len_per_gpu", f"{_ACTOR}.ppo_mini_batch_size"),
    *(f"{_ROLLOUT}.gpu_memory_utilization", f"{_ROLLOUT}.max_num_seqs", f"{_ROLLOUT}.n_gpus_per_node"),
)


def shape(layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, vocabulary: int) -> dict[str, int]:
    """Of transformers' configurations."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
    }


# From the models' published config.json.
MODELS: dict[str, PretrainedConfig] = {
    "Qwen2.5-1.5B-Instruct": Qwen2Config(**shape(28, 1536, 12, 2, 8960, 151936), tie_word_embeddings=True),
    "Qwen2.5-7B-Instruct": Qwen2Config(**shape(28, 3584, 28, 4, 18944, 152064), tie_word_embeddings=False),
    "Qwen3-8B": Qwen3Config(
        **shape(36, 4096, 32, 8, 12288, 151936), head_dim=128, tie_word_embeddings=False, max_position_embeddings=40960
    ),
    "Qwen3-4B-Instruct-2507": Qwen3Config(
        **shape(36, 2560, 32, 8, 9728, 151936), head_dim=128, tie_word_embeddings=True
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the page's files are, and models without weights."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VCPO_HARDWARE", "gpu")
    monkeypatch.setenv("VCPO_RUN_ID", "test")
    for name, config in MODELS.items():
        config.save_pretrained(tmp_path / "models" / name)
        train_tokenizer(Difficulty()).save_pretrained(tmp_path / "models" / name)
    (files,) = [block for block in blocks() if "cat >" in block]
    subprocess.run(["bash", "-euo", "pipefail", "-c", files], check=True, timeout=60)
    return tmp_path


def blocks() -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```$", SECTION, re.DOTALL | re.MULTILINE)


def command(module: str) -> list[str]:
    """The arguments of the page's first command of this module."""
    (line, *_) = [
        line
        for block in blocks()
        for line in block.replace("\\\n", " ").splitlines()
        if line.startswith(f"python -m {module} ")
    ]
    return shlex.split(line, comments=True)[3:]


def test_the_table_is_there() -> None:
    assert [int(gpus) for gpus, *_ in ROWS] == [2, 4, 8, 16, 16]
    assert {model for _, model, *_ in ROWS} == set(MODELS)


def test_the_rows(folder: Path) -> None:
    (folder / "questions.csv").write_text("question,answer\n" + "".join(f"{i} + {i}?,{2 * i}\n" for i in range(20)))
    assert prepare_data.main(command("scripts.prepare_data")) == 0
    config = OmegaConf.load(folder / "mine/task/mine.yaml")
    assert Path(config.data.train_files).is_file() and Path(config.data.val_files).is_file()


@pytest.mark.parametrize(("gpus", "model", "settings", "trainer", "sampler"), ROWS)
def test_the_plan_of_a_line(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    gpus: str,
    model: str,
    settings: str,
    trainer: str,
    sampler: str,
) -> None:
    arguments = [*command("recipe.fully_async_policy.main"), f"actor_rollout_ref.model.path=models/{model}"]
    assert "--dry-run" in arguments
    assert main.main([*arguments, *settings.split()]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"Who does what: {gpus} GPUs" in printed
    assert f"It fits: the trainer needs {trainer} GiB of a GPU at most, a sampler {sampler}." in printed


def test_no_size_is_verls_default(folder: Path) -> None:
    config, verls = main.compose(["+task=mine", "hardware=gpu"], folder / "mine"), main.compose(["hardware=gpu"])
    same = [size for size in SIZES if OmegaConf.select(config, size) == OmegaConf.select(verls, size)]
    assert not same
    one = config.data.max_prompt_length + config.data.max_response_length
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu % one == 0


def test_one_gpu_is_refused_before_the_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = main.compose(["+task=mine", "hardware=gpu"], folder / "mine")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(SettingError, match="GPUs of their own, 2 together, and this machine has 1; lower them"):
        check_gpus(config)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("recipe.fully_async_policy.plan.devices.missing_for_triton", lambda: None)
    check_gpus(config)
