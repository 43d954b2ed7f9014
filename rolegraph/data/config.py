"""What `data:` in a config may say. Light imports only: validating a config loads no data library."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

SourceName = Literal["jsonl", "parquet", "huggingface", "reasoning_gym"]

_NEEDS: dict[str, str] = {"jsonl": "path", "parquet": "path", "huggingface": "path", "reasoning_gym": "task"}
_ONLY_FOR: dict[str, str] = {
    **dict.fromkeys(("name", "split", "revision"), "huggingface"),
    **dict.fromkeys(("task", "task_config", "size", "seed", "question_format", "answer_format"), "reasoning_gym"),
}
SOURCE_KEYS = ("path", *_ONLY_FOR)
"""Keys that mean something for their source alone."""


@dataclass(frozen=True)
class DataConfig:
    """Where prompts come from, how they become tokens, and what happens to rows that do not fit.

    A row has `messages` (chat) or `prompt` (a string), and for sft a `response` or a last assistant message; for pt it
    has `text`. A `teacher_prompt` (messages, or a string) is what a teacher sees in place of the prompt. Reserved names
    aside, its columns travel with the prompt to the reward functions.
    """

    node: ClassVar[str] = "data"
    """Where these settings stand in a config, for messages."""

    source: SourceName | None = None
    """jsonl, parquet, huggingface or reasoning_gym."""
    path: str | tuple[str, ...] | None = None
    """jsonl and parquet: a file, a folder, a glob pattern, or a list of these. huggingface: a folder or a hub name."""
    name: str | None = None
    """huggingface: the configuration (subset) of the dataset."""
    split: str = "train"
    """huggingface: the split, in the notation of `datasets` (`train[:1000]`)."""
    revision: str | None = None
    """huggingface: the revision of a dataset on the hub."""
    task: str | None = None
    """reasoning_gym: the name of the task, as in `chain_sum`."""
    task_config: dict[str, Any] = field(default_factory=dict)
    """reasoning_gym: settings of the task (`{max_terms: 2, max_digits: 1}`)."""
    size: int = 1000
    """reasoning_gym: how many rows are drawn."""
    seed: int = 0
    """reasoning_gym: which rows are drawn; the order of training follows the run's own seed."""
    question_format: str = "{question}"
    """reasoning_gym: the user message; `{question}` stands for the task's question. Instructions go around it."""
    answer_format: str = "{answer}"
    """reasoning_gym: the response that a warm start learns; `{answer}` stands for the task's answer."""
    columns: dict[str, str] = field(default_factory=dict)
    """Renames columns: `{prompt: question}` reads the dataset's `question` as the prompt."""
    id_column: str | None = None
    """The column that names a row; null: `uid`, as a sampling run writes it, or else a hash of the row's content."""
    preprocessors: tuple[str, ...] = ()
    """Import paths of functions `row -> row | None`, applied in order; null drops the row."""
    external_plugins: tuple[str, ...] = ()
    """Python files (or modules) with preprocessors of your own: `my/prompts.py` makes `prompts.NAME` known."""
    system_prompt: str | None = None
    """Put before the messages of rows that bring no system message of their own."""
    prompt_as: Literal["user", "text"] = "user"
    """What a `prompt` string is: a user message for the chat template, or raw text that is tokenised as it is."""
    chat_template: str | None = None
    """A Jinja chat template, or the path of a file with one; null takes the model's own."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template (`{enable_thinking: false}`)."""
    max_length: int = 1024
    """Tokens a row may have: of the prompt for RL, of prompt and response together for sft, of the text for pt; any
    number where a service gets the prompts as text."""
    max_teacher_prompt_length: int | None = None
    """Tokens a row's `teacher_prompt` may have; null: max_length."""
    truncation_strategy: Literal["drop", "left"] = "drop"
    """Rows longer than `max_length`: dropped, or cut on the left (the response of an sft row is never cut). The same
    for a `teacher_prompt`."""
    on_bad_row: Literal["skip", "fail"] = "skip"
    """Rows that cannot be read: counted, reported and left out, or the end of the run."""
    on_duplicate: Literal["keep", "drop", "fail"] = "keep"
    """Rows with the uid of an earlier row: kept (under `uid#2`, ...), dropped, or the end of the run."""
    shuffle: bool = True
    """Draw the rows in a new order each epoch; false keeps the order of the source."""
    limit: int | None = None
    """Use at most so many rows, the first that are kept."""

    def problems(self) -> list[str]:
        """What is wrong with these settings taken together, one sentence each, with the key and what to type."""
        if self.source is None:
            return ["data.source is not set: choose jsonl, parquet, huggingface or reasoning_gym (or data=NAME)"]
        found = []
        need = _NEEDS[self.source]
        if not getattr(self, need):
            found.append(f"data.source={self.source} needs data.{need}: set data.{need}=...")
        for key, source in _ONLY_FOR.items():
            if source != self.source and self._is_set(key):
                advice = "remove it" if key != "size" else "use data.limit"
                found.append(f"data.{key} is for data.source={source}, and data.source is {self.source}: {advice}")
        if self.source == "reasoning_gym" and self.path:
            found.append("data.path is not for data.source=reasoning_gym: remove it, or choose another source")
        if self.source == "huggingface" and not isinstance(self.path, str | None):
            found.append("data.path must be one folder or hub name for data.source=huggingface, not a list")
        if self.source == "reasoning_gym":
            for key in ("question", "answer"):
                text, mark = getattr(self, f"{key}_format"), "{" + key + "}"
                if mark not in text:
                    found.append(f"data.{key}_format={text!r} lacks {mark}, which stands for the task's {key}")
        for key in ("max_length", "size"):
            if getattr(self, key) < 1:
                found.append(f"data.{key}={getattr(self, key)} must be at least 1")
        if self.max_teacher_prompt_length is not None and self.max_teacher_prompt_length < 1:
            found.append(f"data.max_teacher_prompt_length={self.max_teacher_prompt_length} must be at least 1, or null")
        if self.limit is not None and self.limit < 1:
            found.append(f"data.limit={self.limit} must be at least 1, or null for all rows")
        for plugin in self.external_plugins:
            if plugin.endswith(".py") and not Path(plugin).expanduser().is_file():
                found.append(f"data.external_plugins: there is no file {plugin!r} (looked in {Path.cwd()})")
        if self.external_plugins and not self.preprocessors:
            found.append("data.external_plugins has no effect without data.preprocessors, which name functions of it")
        for path in self.preprocessors:
            if "." not in path:
                found.append(f"data.preprocessors: {path!r} is no import path: write module.function")
        return found

    @property
    def teacher_prompt_limit(self) -> int:
        """`max_teacher_prompt_length` with its default filled in."""
        return self.max_teacher_prompt_length or self.max_length

    def _is_set(self, key: str) -> bool:
        (default,) = (f.default for f in fields(self) if f.name == key)
        return getattr(self, key) not in (default, {})
