"""What packed norms rely on inside Transformer Engine is there."""

from tests.upstream import check, transformer_engine


def test_the_installed_version_is_the_one_we_know() -> None:
    """Catches another version in which a module, a parameter or a call of the backwards has another name."""
    assert not check.differences(transformer_engine.PLACES)
