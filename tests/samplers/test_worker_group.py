"""The port on which the trainer's processes meet."""

from pathlib import Path

import pytest

from verl_vcpo.loop.processes import worker_group


@pytest.mark.parametrize("given_out", [32768, 16384, 2048])
def test_the_ports_are_below_the_kernels(given_out: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "range").write_text(f"{given_out}\t60999\n")
    monkeypatch.setattr(worker_group, "_KERNELS_RANGE", tmp_path / "range")
    for _ in range(100):
        ports = worker_group.port_range()
        assert ports and 1024 <= ports[0] < ports[1] <= given_out


def test_where_the_kernel_has_all_ports_it_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "range").write_text("1024\t65535\n")
    monkeypatch.setattr(worker_group, "_KERNELS_RANGE", tmp_path / "range")
    assert worker_group.port_range() is None
