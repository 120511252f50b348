"""What a row of the tables says: one place where our code depends on another package's inside."""

from dataclasses import dataclass
from enum import StrEnum


class How(StrEnum):
    """The ways in which our code depends on upstream's. `shape` of a row means something else in each."""

    SUBCLASSES = "subclasses"
    """A class of ours has theirs as a base. No shape."""
    OVERRIDES = "overrides"
    """A method of ours replaces theirs, whose parameters are written down in signatures.txt. No shape."""
    REPLACES = "replaces"
    """A function, attribute or module global of theirs is exchanged while our code runs; as for OVERRIDES. No shape."""
    REGISTERS = "registers with"
    """Something of ours is entered in a registry of theirs. Shape: as for CALLS."""
    CALLS = "calls"
    """Ours calls or constructs theirs. Shape: the parameters that ours relies on, `name=value` where on the default."""
    USES = "uses"
    """Ours reads or sets an attribute, a constant or a type of theirs. Shape: `= value` where ours relies on it."""
    NAMES = "names"
    """Ours has a string that theirs has too: a field, a tag, a metric, a message, an environment variable. Shape: the
    string, as it stands in the source of theirs."""
    SETTING = "setting"
    """A setting of verl's configuration that the code, not only a yaml file, reads. Shape: `= value` of the default."""


@dataclass(frozen=True)
class Reach:
    """One row.

    `theirs` is `module:name`; of a SETTING the setting's name. `only` is a module or a distribution: where it is not
    installed there is nothing to compare.
    """

    ours: str
    how: How
    theirs: str
    shape: str
    why: str
    only: str = ""


@dataclass(frozen=True)
class Place:
    """The rows of one file of ours. `file` is its path in the repository, or a few words for several files."""

    file: str
    look_at: str
    """What to read in upstream when the pin moves."""
    reaches: tuple[Reach, ...]
    only: str = ""
    """As of a row, for all of them."""

    @property
    def module(self) -> str | None:
        """The file's import name; None of several files."""
        if not self.file.endswith(".py") or {",", "{"} & set(self.file):
            return None
        return self.file.removeprefix("verl/").removesuffix(".py").replace("/", ".")
