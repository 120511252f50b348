"""docs/reference/settings.md is what the code says."""

from omegaconf import OmegaConf

from recipe.fully_async_policy.settings import own_files
from scripts import settings_page


def test_the_page_is_what_the_command_writes() -> None:
    assert settings_page.PAGE.read_text() == settings_page.page(), "python -m scripts.settings_page --write"


def test_no_setting_is_left_out() -> None:
    """Also none whose line in the yaml lost its comment."""
    text = settings_page.page()
    trainer = OmegaConf.load(own_files.CONFIG_DIR / "vcpo_trainer.yaml")
    wanted = ["run_dir", "samples_every", "save_model", "vcpo.norms.how"]
    wanted += [f"async.{name}" for name in trainer["async"]]
    wanted += [f"vcpo.{name}" for name in trainer.vcpo if name not in ("_target_", "norms")]
    assert not [name for name in wanted if f"| `{name}` |" not in text]
    assert not [line for line in text.splitlines() if line.startswith("|") and line.endswith("|  |")]
