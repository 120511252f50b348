"""The verifier's processes end with the file that needed them."""

from collections.abc import Iterator

import pytest

from recipe.tasks import verifier


@pytest.fixture(scope="module", autouse=True)
def _verifiers_processes() -> Iterator[None]:
    yield
    verifier._pool()._pool.close()
