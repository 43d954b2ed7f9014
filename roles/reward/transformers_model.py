"""Reward models that transformers runs: loading them, what they read, and passes over rows of like length."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from rolegraph.errors import ConfigError, TurnError
from rolegraph.role import Role, RoleContext, endpoint
from roles.frozen import FrozenModel
from roles.reward.config import PROMPT, RESPONSE, RewardModelConfig, value_of
from roles.reward.reading import as_messages, as_text

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

_MARKS = re.compile(f"{re.escape(PROMPT)}|{re.escape(RESPONSE)}")
LARGEST_LENGTH = 10**9
"""Lengths from here on are how tokenizers say that they know of no limit."""


class RewardModel:
    """One replica of a model with a head that scores."""

    def __init__(self, config: RewardModelConfig, context: RoleContext, auto_class: str | Callable[[], Any]) -> None:
        """Load it; `auto_class` names a class of transformers, or gives one.

        Raises ConfigError for a checkpoint without the head, whose scores would be noise.
        """
        import transformers

        kind = getattr(transformers, auto_class) if isinstance(auto_class, str) else auto_class()
        self._role = context.role
        self._frozen = FrozenModel(kind, config.folder, config.dtype, context)
        self._model = self._frozen.model
        if missing := self._frozen.missing:
            raise ConfigError(
                f"{context.role}.model={config.folder} has no weights for {', '.join(missing[:3])}: it is no model for "
                f"{kind.__name__}; give a reward model"
            )
        self._is_away = False
        self._tokens = config.max_tokens_per_micro_batch
        self.reader = Reader(config.folder, config.form, context.role)
        self.config: Any = self._model.config
        limits = [config.max_length, self.reader.limit(self.config)]
        self._limit = min((limit for limit in limits if limit is not None), default=None)
        pad = self.reader.tokenizer.pad_token_id
        if value_of(self.config, "pad_token_id") is None and pad is not None:
            self.config.get_text_config().pad_token_id = self.config.pad_token_id = pad
        self._pad: int | None = value_of(self.config, "pad_token_id")
        if self._pad is None:
            _log.warning("%s: the model has no padding token, so each row is a pass of its own", config.folder)

    def too_long(self, row: Encoded) -> str | None:
        """Why a row is not read, where it has more tokens than the model takes."""
        if self._limit is None or len(row.ids) <= self._limit:
            return None
        return f"too_long: {len(row.ids)} tokens, and the model reads {self._limit}"

    def move(self, away: bool) -> None:
        """To host memory, or back to the device; without a GPU it stays where it is."""
        self._is_away = away
        self._frozen.move(away)

    def passes(self, rows: Sequence[Encoded]) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        """Rows of like length together: their places among `rows`, and what the model is called with."""
        from roles.train.microbatch import plan_microbatches

        if self._is_away:
            raise TurnError(f"{self._role} has given its device away: call onload() before score")
        lengths = [len(row.ids) for row in rows]
        limit = max([self._tokens, *lengths])
        plan = (
            [[row] for row in range(len(rows))] if self._pad is None else plan_microbatches(lengths, tokens_per=limit)
        )
        for part in plan:
            if part:
                yield list(part), self._padded([rows[row] for row in part])

    def __call__(self, inputs: dict[str, Tensor], *, only: Sequence[int] | None = None, **extra: Any) -> Tensor:
        """[rows, ...] float32 logits on the host: all, or those of some outputs."""
        import torch

        with torch.no_grad():
            logits: Tensor = self._model(**inputs, **extra).logits
            # Before they are copied: a vocabulary of them is much.
            return (logits if only is None else logits[..., list(only)]).float().cpu()

    def _padded(self, rows: Sequence[Encoded]) -> dict[str, Tensor]:
        import torch

        width = max(len(row.ids) for row in rows)

        def stack(parts: Sequence[Sequence[int]], fill: int) -> Tensor:
            return torch.tensor([[*part, *[fill] * (width - len(part))] for part in parts], device=self._frozen.home)

        inputs = {
            "input_ids": stack([row.ids for row in rows], self._pad or 0),
            "attention_mask": stack([[1] * len(row.ids) for row in rows], 0),
        }
        if rows[0].types is not None:
            inputs["token_type_ids"] = stack([row.types or [] for row in rows], 0)
        return inputs


class RewardModelRole(Role):
    """What roles with such a model do alike; the kind of reward comes from a class beside it."""

    queue_rows: ClassVar[int] = 64
    queue_in_flight: ClassVar[int] = 1
    _model: RewardModel

    @endpoint()
    def offload(self) -> None:
        """Move the model to host memory; without a GPU it stays where it is."""
        self._model.move(away=True)

    @endpoint()
    def onload(self) -> None:
        """Move the model back to its GPU."""
        self._model.move(away=False)


class Encoded:
    """What the model reads of one row."""

    __slots__ = ("ids", "places", "types")

    def __init__(self, ids: list[int], types: list[int] | None = None, places: Sequence[int] = ()) -> None:
        self.ids = ids
        self.types = types
        """Which of two texts each token is of, for models that ask for it."""
        self.places = places
        """The tokens whose outputs are scores."""


class Reader:
    """From prompt and response to tokens, by the reward model's own tokenizer."""

    def __init__(self, folder: str, form: str | None, role: str) -> None:
        from transformers import AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._form = form
        self._role = role
        self.has_template = bool(self.tokenizer.chat_template)

    def limit(self, model_config: Any) -> int | None:
        """Tokens that model and tokenizer have positions for; null where they do not say."""
        known = [value_of(model_config, "max_position_embeddings"), self.tokenizer.model_max_length]
        return min((int(each) for each in known if each and 0 < each < LARGEST_LENGTH), default=None)

    def encode(self, prompt: Any, response: str) -> Encoded:
        """By the form that is configured, or the chat template; without either, as a pair of texts."""
        if self._form is None and not self.has_template:
            found = self.tokenizer(as_text(prompt), response)
            return Encoded(found["input_ids"], found.get("token_type_ids"))
        return Encoded(self.ids(prompt, response))

    def ids(self, prompt: Any, response: str) -> list[int]:
        """By the form that is configured, or the chat template."""
        found: list[int] = self._ids(self.text(prompt, response))["input_ids"]
        return found

    def text(self, prompt: Any, response: str) -> str:
        """What the model reads; raises ConfigError where nothing says how prompt and response stand together."""
        if self._form is not None:
            # In one pass: what a text says is never taken for a mark of the form.
            texts = {PROMPT: as_text(prompt), RESPONSE: response}
            return _MARKS.sub(lambda mark: texts[mark[0]], self._form)
        if not self.has_template:
            raise ConfigError(
                f"{self._role}.model has a tokenizer without a chat template: say how prompt and response stand "
                f'together, as in {self._role}.form="{{prompt}} {{response}}"'
            )
        messages = [*as_messages(prompt), {"role": "assistant", "content": response}]
        text: str = self.tokenizer.apply_chat_template(messages, tokenize=False)
        return text

    def with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids, and the characters that each stands for."""
        if not self.tokenizer.is_fast:
            raise ConfigError(f"{self._role}.model has a tokenizer that does not tell where in a text its tokens are")
        found = self._ids(text, return_offsets_mapping=True)
        return found["input_ids"], found["offset_mapping"]

    def _ids(self, text: str, **options: Any) -> Any:
        # A chat template writes the special tokens itself.
        return self.tokenizer(text, add_special_tokens=self._form is not None, **options)
