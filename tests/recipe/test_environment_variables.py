"""Variables of the environment that a run would fail on: refused before anything starts, in a line."""

import pytest

from recipe.fully_async_policy.settings.variables import check_variables
from tests.recipe.refused import run

pytestmark = pytest.mark.usefixtures("nothing_starts")


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("OMP_NUM_THREADS", "0", "give a whole number, 1 or more, or unset it"),
        ("OMP_NUM_THREADS", "", "give a whole number"),
        ("OMP_NUM_THREADS", "two", "give a whole number"),
        ("MKL_NUM_THREADS", "-1", "give a whole number"),
        ("VLLM_PORT", "eighty", "give the number of a port, or unset it"),
        ("RAY_ADDRESS", "garbage", "is no address of a Ray cluster; give HOST:PORT, or leave it out"),
        ("RAY_ADDRESS", "10.0.0.1", "is no address of a Ray cluster"),
        ("RAY_ADDRESS", "10.0.0.1:70000", "is no address of a Ray cluster"),
        ("RAY_ADDRESS", "ray://10.0.0.1:10001", "is no address of a Ray cluster"),
        ("RAY_ADDRESS", "tcp://10.0.0.1:6379", "is no address of a Ray cluster"),
        ("RAY_ADDRESS", "127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1 (unavailable); mend the address"),
    ],
)
def test_environment_variables(
    variable: str,
    value: str,
    words: str,
    good: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv(variable, value)
    (line,) = run(good, capsys).splitlines()
    assert value in line and words in line


@pytest.mark.parametrize("value", ["4", "4,2", " 2"])
def test_threads_as_openmp_takes_them(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    check_variables()
