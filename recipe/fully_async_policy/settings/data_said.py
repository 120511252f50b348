"""What is said of data on which a run can train, but perhaps not as meant."""

import json
from collections.abc import Iterable, Iterator

from recipe.fully_async_policy.settings.data_file import DataFile
from verl_vcpo.common.data_columns import OF_A_RESPONSE, OF_THE_LOOP, OF_THE_REWARD, OF_THE_ROW


def of_columns(file: DataFile, prompt_key: str, of_extra_info: Iterable[str]) -> Iterator[str]:
    """A line on the columns whose names the run uses for something else, and one on such keys of `extra_info`."""
    others = {*OF_THE_LOOP, *OF_A_RESPONSE} - {prompt_key}
    if taken := [name for name in file.columns if name in others]:
        yield f"{file.name}: not used, as the run makes its own: {_column(taken)}"
    for name in file.columns:
        if name in OF_THE_ROW and name != prompt_key:
            yield f"{file.name}: not used: {_column([name])}; it is read from {OF_THE_ROW[name]}"
    if replaced := [name for name in of_extra_info if name in OF_THE_REWARD]:
        keys = ", ".join(replaced)
        yield f"{file.name}: the reward gets the response's own {keys} in extra_info; rename the row's to keep it"


def _column(names: list[str]) -> str:
    return f"column{'s' if len(names) > 1 else ''} {', '.join(names)}"


def of_both(training: list[DataFile], held_out: list[DataFile], prompt_key: str) -> str | None:
    """A line on held-out rows that are trained on, too: the same prompt and ground truth; None where there are none."""
    if not training or not held_out:
        return None
    trained = {key for file in training for key in _keys(file, prompt_key)}
    keys = [key for file in held_out for key in _keys(file, prompt_key)]
    both = sum(key in trained for key in keys)
    words = "they are trained on, so their accuracy does not tell what is learned of other rows"
    return f"data.val_files: {both} of {len(keys)} rows are in data.train_files, too: {words}" if both else None


def _keys(file: DataFile, prompt_key: str) -> Iterator[int]:
    for row in file.rows(prompt_key, "reward_model"):
        yield hash(json.dumps([row[prompt_key], row["reward_model"]["ground_truth"]], sort_keys=True, default=str))
