"""A row of the data: of which no reward or no model can make sense, or which asks for what the run does not do."""

import math
import reprlib
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from recipe.fully_async_policy.settings.agent_loop import is_users_own
from recipe.fully_async_policy.settings.errors import choices
from recipe.fully_async_policy.settings.model import read_tokenizer
from verl_vcpo.common.data_columns import AGENT_LOOP, GREEDY

OF_A_SAMPLE = ("data_source", "reward_model", "extra_info")
"""The columns that the reward gets."""
_ROLES = ("system", "developer", "user", "assistant", "tool")
"""Of chat messages. A chat template may know others, which its text has in quotes."""


class RowRules:
    """What a row has to be for a run of `config`, which is read once: its files may have millions of rows."""

    def __init__(self, config: DictConfig) -> None:
        self._key, self._model = config.data.prompt_key, config.actor_rollout_ref.model
        self._loop, self._own_loop = config.actor_rollout_ref.rollout.agent.default_agent_loop, is_users_own(config)
        names = (config.data.get(name) for name in ("image_key", "video_key", "audio_key"))
        self._media = [name for name in names if name]
        self.columns = (self._key, *OF_A_SAMPLE, AGENT_LOOP, GREEDY, *self._media)
        """The columns that are looked at."""

    def why_unusable(self, row: dict[str, Any]) -> str | None:
        """What is wrong with a row; None: nothing."""
        return self._why_no_prompt(row[self._key]) or _why_no_sample(row) or self._why_another_run(row)

    def _why_no_prompt(self, prompt: Any) -> str | None:
        key = self._key
        if not isinstance(prompt, list) or not prompt or not all(_has(m, "role", "content") for m in prompt):
            form = "[{'role': 'user', 'content': TEXT}]"
            return f"{key!r} is {reprlib.repr(prompt)}; make it a list of messages, {form}"
        for message in prompt:
            role, content = message["role"], message["content"]
            if not isinstance(content, str | list):
                return f"a message of {key!r} has the content {content}; make it text"
            if not isinstance(role, str) or (role not in _ROLES and not self._in_chat_template(role)):
                return f"a message of {key!r} has the role {role!r}; {choices(role, _ROLES)}"
        if prompt[-1]["role"] == "assistant" and not self._own_loop:
            words = "end it before that message, which the model is to write: it would begin another one"
            return f"{key!r} ends with a message of the assistant; {words}"
        return None

    def _why_another_run(self, row: dict[str, Any]) -> str | None:
        loop, greedy = row.get(AGENT_LOOP), row.get(GREEDY)
        if loop not in (None, self._loop):
            setting = f"actor_rollout_ref.rollout.agent.default_agent_loop={self._loop}"
            return f"{AGENT_LOOP!r} is {loop!r}; a run has one agent loop, here {setting}; set it, or remove the column"
        if greedy not in (None, True):
            return f"{GREEDY!r} is {greedy!r}; a run learns from drawn responses: remove the column"
        media = [name for name in self._media if row.get(name)]
        if media and self._reads_text_alone:
            return f"{media[0]!r} is not empty, and {self._model.path} reads text alone; remove the column"
        return None

    def _in_chat_template(self, role: str) -> bool:
        return f"'{role}'" in self._chat_template or f'"{role}"' in self._chat_template

    @cached_property
    def _chat_template(self) -> str:
        """Of a model that is on this machine."""
        return str(read_tokenizer(self._model).chat_template) if Path(self._model.path).is_dir() else ""

    @cached_property
    def _reads_text_alone(self) -> bool:
        folder = Path(self._model.path)
        return folder.is_dir() and not any(folder.glob("*processor_config.json"))


def _why_no_sample(row: dict[str, Any]) -> str | None:
    reward, extra, source = row["reward_model"], row.get("extra_info"), row["data_source"]
    if not isinstance(source, str) or not source.strip():
        return f"'data_source' is {reprlib.repr(source)}; make it text, the name of the task or of its source"
    truth = reward["ground_truth"] if _has(reward, "ground_truth") else None
    if truth is None or (isinstance(truth, float) and not math.isfinite(truth)):
        words = "make it {'style': 'rule', 'ground_truth': ...} with what the reward compares with"
        return f"'reward_model' has no ground_truth; {words}, or '' where it compares with nothing"
    if extra is not None and not isinstance(extra, dict):
        return f"'extra_info' is {extra!r}; make it a record, {{'index': 0}}"
    return None


def _has(value: Any, *names: str) -> bool:
    return isinstance(value, dict) and all(name in value for name in names)
