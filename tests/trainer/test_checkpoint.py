"""A checkpoint is whole or it is not there."""

from pathlib import Path

import pytest

from verl_vcpo.trainer.ppo.v1 import checkpoint


def save(root: Path, step: int, text: str = "weights") -> Path:
    folder = checkpoint.staging(root) / f"global_step_{step}"
    (folder / "actor").mkdir(parents=True)
    (folder / "actor" / "model.bin").write_text(text * 1000)
    (folder / "data.pt").write_text("position")
    return checkpoint.publish(root, step)


def test_what_is_published_is_whole_and_verls_tracker_points_to_it(tmp_path: Path) -> None:
    folder = save(tmp_path, 5)
    assert folder == tmp_path / "global_step_5" and checkpoint.damage(folder) is None
    assert (tmp_path / checkpoint.TRACKER).read_text() == "5"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_5", checkpoint.TRACKER]


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    "spoil, what", [(truncate, "bytes, not"), (flip_a_bit, "has changed"), (Path.unlink, "is missing")]
)
@pytest.mark.parametrize("file", ["actor/model.bin", "data.pt"])
def test_a_damaged_checkpoint_is_found_out_and_the_one_before_it_taken(
    tmp_path: Path, spoil: object, what: str, file: str
) -> None:
    save(tmp_path, 5)
    spoil(save(tmp_path, 10) / file)  # type: ignore[operator]
    assert what in (checkpoint.damage(tmp_path / "global_step_10") or "")
    folder, complaints = checkpoint.newest_whole(tmp_path)
    assert folder == tmp_path / "global_step_5"
    assert len(complaints) == 1 and "global_step_10 is damaged" in complaints[0]


def test_a_crash_while_writing_leaves_the_old_ones(tmp_path: Path) -> None:
    save(tmp_path, 5)
    half = checkpoint.staging(tmp_path) / "global_step_10"
    half.mkdir()
    (half / "model.bin").write_text("half")
    assert checkpoint.newest_whole(tmp_path) == (tmp_path / "global_step_5", [])
    assert checkpoint.damage(save(tmp_path, 10)) is None, "the next attempt starts afresh"


def test_without_a_manifest_it_is_not_whole(tmp_path: Path) -> None:
    (save(tmp_path, 5) / checkpoint.MANIFEST).write_text("{")
    folder, complaints = checkpoint.newest_whole(tmp_path)
    assert folder is None and "manifest.json is missing or unreadable" in complaints[0]


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (2, 10, 9):
        save(tmp_path, step)
    checkpoint.prune(tmp_path, None)
    assert len(checkpoint.checkpoints(tmp_path)) == 3
    checkpoint.prune(tmp_path, 2)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["global_step_10", "global_step_9"]


def test_why_one_was_not_written_names_the_folder_and_the_space_left(tmp_path: Path) -> None:
    line = checkpoint.why_not_written(tmp_path, 4, OSError("write failed\nunexpected pos 704 vs 598"))
    assert f"trainer.default_local_dir={tmp_path} has " in line and "MB free (unexpected pos 704 vs 598)" in line
    assert "\n" not in line
