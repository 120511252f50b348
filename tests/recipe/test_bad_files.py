"""Bad data, models, rewards and folders end before a process starts: exit code 2, one line that says where."""

import asyncio
import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from recipe.fully_async_policy import main
from recipe.fully_async_policy.plan.devices import check_gpus
from recipe.fully_async_policy.settings import run_folder
from recipe.fully_async_policy.settings.data import Sample
from recipe.fully_async_policy.settings.errors import SettingError
from recipe.fully_async_policy.settings.own_code import arguments, check_reward, reward_of
from recipe.fully_async_policy.settings.validate import validate
from tests.kit.checkpoints import write_checkpoint
from tests.recipe.conftest import GOOD_ROW
from tests.recipe.refused import MEGATRON, MODEL, REWARD, composed, run
from tests.recipe.rewards_that_fail import RIGHT, WRONG
from verl_vcpo.common.data_columns import OF_THE_REWARD
from verl_vcpo.common.run_id import RUN_ID_FILE
from verl_vcpo.user_code.killable import Pool

pytestmark = pytest.mark.usefixtures("nothing_starts")
REWARDS = Path(__file__).parent / "rewards_that_fail.py"


def rewritten(good: dict[str, str], *rows: dict[str, Any]) -> None:
    """The rows take the place of the training data's."""
    pd.DataFrame(rows).to_parquet(good["data.train_files"])


@pytest.mark.parametrize(
    ("column", "value", "expected"),
    [
        ("prompt", "1 + 1", "'prompt' is '1 + 1'; make it a list of messages"),
        ("prompt", [{"content": "1 + 1"}], "make it a list of messages"),
        ("prompt", [], "row 0: 'prompt' is []; make it a list of messages"),
        (
            "prompt",
            [{"role": "user", "content": None}],
            "row 0: a message of 'prompt' has the content None; make it text",
        ),
        ("reward_model", "2", "'reward_model' has no ground_truth; make it {'style': 'rule', 'ground_truth': ...}"),
        ("reward_model", {"ground_truth": "2"}, "raises ValueError: countdown ground_truth must be"),
        ("data_source", "cuontdown", "raises ValueError: data_source='cuontdown' has no reward"),
        ("prompt", [{"role": "user", "content": 3}], "a message of 'prompt' has the content 3; make it text"),
        (
            "prompt",
            [{"role": "usr", "content": "1"}],
            "row 0: a message of 'prompt' has the role 'usr'; did you mean",
        ),
        ("prompt", [{"role": "Human", "content": "1"}], "the role 'Human'; choose one of system, developer, user, ass"),
        ("reward_model", {"style": "rule", "ground_truth": None}, "row 0: 'reward_model' has no ground_truth; make"),
        ("extra_info", "index 3", "'extra_info' is 'index 3'; make it a record, {'index': 0}"),
        ("reward_model", {"ground_truth": float("nan")}, "row 0: 'reward_model' has no ground_truth; make"),
        ("reward_model", {"ground_truth": ["72"]}, "ground_truth is a list, ['72']: give '72' alone"),
        *[
            ("data_source", value, f"row 0: 'data_source' is {value!r}; make it text")
            for value in (["countdown"], {"name": "countdown"}, 3, None, b"countdown", " ")
        ],
        (
            "prompt",
            [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}],
            "row 0: 'prompt' ends with a message of the assistant; end it before",
        ),
        (
            "agent_name",
            "tool_agent",
            "row 0: 'agent_name' is 'tool_agent'; a run has one agent loop, here actor_rollout",
        ),
        ("__do_sample__", False, "row 0: '__do_sample__' is False; a run learns from drawn responses"),
        ("images", ["1.png"], "row 0: 'images' is not empty"),
    ],
)
def test_a_wrong_row(
    good: dict[str, str], capsys: pytest.CaptureFixture[str], column: str, value: Any, expected: str
) -> None:
    rewritten(good, *[{**GOOD_ROW, column: value}] * 16)
    line = run(good, capsys)
    assert expected in line and f"data.train_files={good['data.train_files']}" in line


def test_the_row_that_is_wrong_is_named(good: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    empty = {**GOOD_ROW, "prompt": []}
    rewritten(good, *[GOOD_ROW] * 20, empty)
    assert "row 20: 'prompt' is []" in run(good, capsys)
    rewritten(good, *[GOOD_ROW] * 20, {**GOOD_ROW, "reward_model": {"ground_truth": None}})
    assert "row 20: 'reward_model' has no ground_truth" in run(good, capsys)
    strange = {"role": "critic", "content": "No."}
    rewritten(good, *[GOOD_ROW] * 20, {**GOOD_ROW, "prompt": [*GOOD_ROW["prompt"], strange]})
    assert "row 20: a message of 'prompt' has the role 'critic'" in run(good, capsys)
    rewritten(good, *[GOOD_ROW] * 20, {**GOOD_ROW, "data_source": "new"})
    assert f"data.train_files={good['data.train_files']}: row 20 ('new')" in run(good, capsys)


def test_a_content_in_parts(good: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    rewritten(good, *[{**GOOD_ROW, "prompt": [{"role": "user", "content": [{"type": "text", "text": "1"}]}]}] * 16)
    file = Path(good[f"{MODEL}.path"]) / "chat_template.jinja"
    for template, expected in (
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            "data.prompt_key=prompt: the chat template of the model",
        ),
        (
            "{% for m in messages %}{{ m.content + '.' }}{% endfor %}",
            "the chat template refuses a prompt (can only conc",
        ),
    ):
        file.write_text(template)
        assert expected in run(good, capsys)
    file.write_text("{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}")
    validate(composed(good))


def test_a_json_line_that_cannot_be_read(good: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    file = Path(good["data.train_files"]).with_suffix(".jsonl")
    lines = [json.dumps(GOOD_ROW)] * 2
    for line, expected in (
        ('{"prompt": "é"}'.encode("latin-1"), "line 3: not text in UTF-8 (byte 0xe9); save the file as UTF-8"),
        (rb'{"prompt": "\ud800"}', "line 3: \\ud800 is half a character; write the whole one, or leave it out"),
    ):
        file.write_bytes("\n".join(lines).encode() + b"\n" + line)
        assert f"error: data.train_files={file}: {expected}" in run({**good, "data.train_files": str(file)}, capsys)


def test_a_parquet_file_that_verl_cannot_read(good: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    table = pa.Table.from_pylist([{name: value for name, value in GOOD_ROW.items() if name != "extra_info"}])
    pairs = pa.array([[("index", 1)]], pa.map_(pa.string(), pa.int64()))
    pq.write_table(table.append_column("extra_info", pairs), good["data.train_files"])
    assert "verl cannot read a column (Arrow type map" in run(good, capsys)
    text = pa.array([b"\xff"]).view(pa.string())
    pq.write_table(table.set_column(1, "data_source", text), good["data.train_files"])
    assert "holds text that is not in UTF-8" in run(good, capsys)


def test_levels_need_numbered_rows(good: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    files = f"[{good['data.train_files']},{good['data.val_files']}]"
    levels = {**good, "data.train_files": files, "data.shares": "[1]", "data.levels": "[2]"}
    assert "row 1: extra_info.index is 0 again; data.levels tells rows by it" in run(levels, capsys)
    rewritten(good, *[{**GOOD_ROW, "extra_info": {"split": "train"}}] * 16)
    assert "row 0: extra_info.index is missing; data.levels tells rows by it" in run(levels, capsys)


def test_what_is_said_of_the_data(good: dict[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    row = {**GOOD_ROW, "responses": ["2"], "rm_scores": 1.0, "agent_name": "single_turn_agent", "tools_kwargs": "{}"}
    row["extra_info"] = {"index": 0, "num_turns": 4, "split": "train"}
    rewritten(good, *[row] * 16)
    other = {**GOOD_ROW, "prompt": [{"role": "user", "content": "2 + 1"}]}
    pd.DataFrame([other] * 3 + [GOOD_ROW]).to_parquet(tmp_path / "val.parquet")
    validate(composed({**good, "data.val_files": f"{tmp_path}/val.parquet"}))
    file = f"data.train_files={good['data.train_files']}"
    assert capsys.readouterr().out.splitlines() == [
        f"{file}: not used, as the run makes its own: columns responses, rm_scores, agent_name",
        f"{file}: not used: column tools_kwargs; it is read from extra_info.tools_kwargs",
        f"{file}: the reward gets the response's own num_turns in extra_info; rename the row's to keep it",
        "data.val_files: 1 of 4 rows are in data.train_files, too: they are trained on, so their accuracy does not "
        "tell what is learned of other rows",
    ]


@pytest.mark.parametrize("column", ["data_source", "prompt", "reward_model"])
def test_a_missing_column(good: dict[str, str], capsys: pytest.CaptureFixture[str], column: str) -> None:
    rewritten(good, {k: v for k, v in GOOD_ROW.items() if k != column})
    assert f"column {column!r} is missing" in run(good, capsys)


def test_an_empty_and_an_unreadable_parquet(good: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    file = good["data.train_files"]
    pd.DataFrame([GOOD_ROW]).head(0).to_parquet(file)
    assert "holds no rows" in run(good, capsys)
    Path(file).write_text("not a parquet file")
    assert "not a readable parquet file" in run(good, capsys)


def test_a_role_that_the_chat_template_knows(good: dict[str, str]) -> None:
    rewritten(good, *[{**GOOD_ROW, "prompt": [*GOOD_ROW["prompt"], {"role": "critic", "content": "No."}]}] * 16)
    template = "{% for m in messages %}{{ m.content if m.role == 'critic' else '>' }}{% endfor %}"
    (Path(good[f"{MODEL}.path"]) / "chat_template.jinja").write_text(template)
    validate(composed(good))


def test_globs_several_files_json_and_any_index(good: dict[str, str], tmp_path: Path) -> None:
    """What verl reads passes."""
    row = {**GOOD_ROW, "extra_info": {"index": "3f1a15a7-uuid"}}
    pd.DataFrame([row] * 8).to_parquet(tmp_path / "part-0.parquet")
    pd.DataFrame([row] * 8).to_parquet(tmp_path / "part-1.parquet")
    pd.DataFrame([row] * 16).to_json(tmp_path / "rows.jsonl", orient="records", lines=True)
    (tmp_path / "rows.json").write_text(json.dumps([row] * 16))
    parts = [f"{tmp_path}/part-0.parquet", f"{tmp_path}/part-1.parquet"]
    for given in (
        f"{tmp_path}/part-*.parquet",
        f"[{','.join(parts)}]",
        f"{tmp_path}/rows.jsonl",
        f"{tmp_path}/rows.json",
    ):
        config = composed({**good, "data.train_files": given})
        main.check(config)
        if "part" in given:
            assert list(config.data.train_files) == parts


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "raises",
            r"raises KeyError: 'answer' \(rewards_that_fail.py:\d+\), for a made-up response to data.train",
        ),
        ("exits", "gave no result: its process ended with exit code 3, for .*; mend the function"),
        ("hangs", "took longer than 1 s, for .*; raise async.reward_timeout_s"),
        ("of_another_library", r"raises TypeError: of_another_library\(\) .* argument"),
        ("no_function", "does not load: there is no function no_function, but .*raises, .*; name the function"),
    ],
)
def test_a_reward_that_fails(good: dict[str, str], capfd: pytest.CaptureFixture[str], name: str, expected: str) -> None:
    limit_s = "1" if name == "hangs" else "60"
    wrong = {f"{REWARD}.path": str(REWARDS), f"{REWARD}.name": name, "async.reward_timeout_s": limit_s}
    assert re.search(rf"\.name={name}: it {expected}", run({**good, **wrong}, capfd))


def sample(truth: str) -> Sample:
    return Sample("FILE: row 3", "source", truth, {})


def test_what_no_reward_may_return(good: dict[str, str]) -> None:
    config = composed({**good, f"{REWARD}.path": str(REWARDS), f"{REWARD}.name": "by_truth"})
    for name, (_, expected) in WRONG.items():
        with pytest.raises(SettingError) as refused:
            check_reward(config, [sample(name)])
        line = str(refused.value)
        assert re.search(".*".join(map(re.escape, expected.split("*"))), line), line
        assert "for a made-up response to FILE: row 3 ('source')" in line and "\n" not in line
        assert "raises" not in line and "mend" not in line, "the function has raised nothing"


def test_what_a_reward_may_return(good: dict[str, str]) -> None:
    config = composed({**good, f"{REWARD}.path": str(REWARDS), f"{REWARD}.name": "by_truth"})
    check_reward(config, [sample(name) for name in RIGHT])

    async def results() -> list[Any]:
        pool = Pool(reward_of(config))
        try:
            return [await pool.call(arguments(sample(name), "")) for name in RIGHT]
        finally:
            pool.close()

    expected = [value for _, value in RIGHT.values()]
    assert repr(asyncio.run(results())) == repr(expected), "Python's own numbers"


def test_a_reward_is_tried_with_what_it_gets_of_a_response() -> None:
    facts = arguments(sample("1"), "")["extra_info"]
    assert isinstance(facts, dict) and {*OF_THE_REWARD} - facts.keys() == {"num_cached_tokens", "tool_use"}


def test_an_agent_loop_of_the_users_own_may_give_the_reward(good: dict[str, str]) -> None:
    config = composed(good)
    config.reward.custom_reward_function.path = None
    with pytest.raises(SettingError, match="for a made-up response"):  # verl has no reward for this data source
        check_reward(config, [sample("1")])
    config.actor_rollout_ref.rollout.agent.default_agent_loop = "mine"
    check_reward(config, [sample("1")])


def test_a_reward_of_a_broken_file(good: dict[str, str], capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    for text, error in (("def compute_score(", "SyntaxError"), ("import no_such_package", "ModuleNotFoundError")):
        file.write_text(text)
        line = run({**good, f"{REWARD}.path": str(file)}, capfd)
        assert f"{REWARD}.path={file} .name=compute_score: it does not load: it raises {error}" in line


def test_a_broken_model_folder(good: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(good[f"{MODEL}.path"])
    template = folder / "chat_template.jinja"
    for file, text, expected in (
        (template, "{{ raise_exception('no such role') }}", "the chat template refuses a prompt (no such role)"),
        (template, None, "the tokenizer has no chat template"),
        (folder / "tokenizer.json", None, "the folder has no tokenizer (tokenizer.json)"),
        (folder / "model.safetensors", "cut off", "model.safetensors cannot be read"),
        (folder / "model.safetensors", "", "the folder has no weights"),
        (
            folder / "model.safetensors.index.json",
            '{"weight_map": {"a": "1.safetensors"}}',
            "1 of 1 files of weights are",
        ),
        (folder / "config.json", "{", "config.json cannot be read"),
        (folder / "config.json", "{}", "config.json names no model_type"),
        (folder / "config.json", '{"a": ' * 9999, "config.json cannot be read"),
        (
            folder / "config.json",
            '{"model_type": "qwen2", "rope_scaling": []}',
            "has rope_scaling=[], which is no object",
        ),
    ):
        if text is None:
            file.unlink()
        else:
            file.write_text(text)
        line = run(good, capsys)
        assert f"error: {MODEL}.path={folder}: " in line and expected in line


def test_one_run_at_a_time_in_a_folder(good: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with run_folder.taken("run_dir", good["run_dir"]):
        assert main.main([f"{name}={value}" for name, value in good.items()]) == 2
        assert f"run_dir={good['run_dir']}: another run writes there" in capsys.readouterr().err
    assert main.main([f"{name}={value}" for name, value in good.items()]) == 1
    assert "a run would have started" in capsys.readouterr().err
    saved = f"{good['run_dir']}-checkpoints"
    with run_folder.taken("trainer.default_local_dir", saved):
        shared = {**good, "trainer.default_local_dir": saved, "trainer.save_freq": "5"}
        assert main.main([f"{name}={value}" for name, value in shared.items()]) == 2
        assert f"trainer.default_local_dir={saved}: another run writes there" in capsys.readouterr().err


def test_a_disk_without_locks(good: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """filelock would write a marker that outlives a killed run, and keep the run's own successor out."""

    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(SettingError, match=r"has no locks \(flock\), .*; mount it with them"):
        run_folder.taken("run_dir", good["run_dir"])


def test_a_run_whose_checkpoints_are_all_damaged(good: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_checkpoint(Path(good["run_dir"], "checkpoints"), 5)
    (folder / "model").unlink()
    assert main.main([*(f"{name}={value}" for name, value in good.items()), "trainer.resume_mode=auto"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: trainer.default_local_dir={folder.parent}: none of 1 checkpoint(s) is whole")
    assert said.count("\n") == 1 and folder.is_dir()


def test_a_folder_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # of root everything may be
    with pytest.raises(SettingError, match=f"run_dir={tmp_path}/new/run: {tmp_path} may not be written"):
        run_folder.check_folder("run_dir", f"{tmp_path}/new/run")
    with pytest.raises(SettingError, match="run_dir=/proc/run: cannot be made"):
        run_folder.taken("run_dir", "/proc/run")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/tmp/" + 300 * "x", "a name may have 200 bytes"),
        ("/".join(100 * ["y" * 50]), "the whole path 3500"),
        ("a\nb", "cannot be printed"),
        ("a\0b", "cannot be printed"),
        ("~/run", f"~ is not replaced here; give {Path.home()}/run"),
        ("/", "is not of the run alone; give the run a folder of its own"),
        (".", "is not of the run alone"),
        ("recipe/..", "is not of the run alone"),
        (str(Path.home()), "is not of the run alone"),
    ],
)
@pytest.mark.parametrize("setting", ["run_dir", "trainer.default_local_dir"])
def test_a_path_that_is_no_folder_of_a_run(setting: str, path: str, words: str, good: dict[str, str]) -> None:
    config = composed(good)
    OmegaConf.update(config, setting, path)
    for files in (True, False):
        with pytest.raises(SettingError) as refused:
            validate(config, files=files)
        (line,) = {line for line in refused.value.lines if line.startswith(f"{setting}=")}
        assert words in line and "\n" not in line


def test_a_run_goes_on_in_the_folder_that_the_command_is_in(
    good: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(good["run_dir"])
    folder.mkdir()
    (folder / RUN_ID_FILE).write_text("0123456789ab")
    monkeypatch.chdir(folder)
    run_folder.check_paths(composed({**good, "run_dir": "."}))


def test_any_setting_with_a_path_that_the_kernel_refuses(
    good: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    long = 300 * "x"
    assert "file name too long; give another path" in run({**good, f"{MODEL}.path": f"/tmp/{long}"}, capsys)


def test_gpus_that_are_not_there(good: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    config = composed(good)
    config.trainer.device = "cuda"
    config.actor_rollout_ref.rollout.checkpoint_engine.backend = "nccl"
    config.actor_rollout_ref.rollout.tensor_model_parallel_size = 3
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SettingError) as refused:
        main.check(config)
    assert "hardware=gpu: torch finds no GPU on this machine" in str(refused.value)
    assert "rollout.tensor_model_parallel_size=3: does not divide the model's" in str(refused.value)


def test_packages_for_cpus_on_a_machine_with_a_gpu(good: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's build for CUDA would find the GPU in every process of a CPU run, and GPU runs have another vLLM."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    main.prepare_environment([])
    assert os.environ["VCPO_HARDWARE"] == "cpu"
    with pytest.raises(SettingError, match="hardware=cpu: this torch, made for CUDA, finds the machine's GPU; take it"):
        check_gpus(composed(good))


def test_a_vocabulary_that_tensor_parallel_ranks_cannot_share(
    good: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(good[f"{MODEL}.path"]) / "config.json"
    size = f"{MEGATRON}.tensor_model_parallel_size"
    four = {size: "4", "trainer.n_gpus_per_node": "4"}
    file.write_text(json.dumps({"model_type": "qwen2", "vocab_size": 62}))
    assert f"{size}=4: does not divide the 62 tokens of {file}; set it to a divisor" in run({**good, **four}, capsys)
    file.write_text(json.dumps({"model_type": "qwen2", "vocab_size": 64}))
    validate(composed({**good, **four}))
