"""Process rewards by a model that scores at a token behind each step."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from rolegraph.batch import Batch
from rolegraph.errors import AlignmentError, ConfigError
from roles.prm.base import StepPRM, StepScores
from roles.prm.config import STEP, TOKEN, ModelPRMConfig
from roles.reward.config import label_index, labels_problem
from roles.reward.reading import prompts_of, uids_of
from roles.reward.transformers_model import Encoded, RewardModel, RewardModelRole

_MARKS = re.compile(f"{re.escape(STEP)}|{re.escape(TOKEN)}")


class ModelPRM(RewardModelRole, StepPRM):
    """A replica of the model; a step's score is what it says at the token behind the step.

    Which tokens these are is known from where the steps were put, so a response that has the token itself confuses
    nothing. A response that is too long for the model has no scores, rather than those of a part of it.
    """

    Config: ClassVar[type[ModelPRMConfig]] = ModelPRMConfig

    config: ModelPRMConfig

    def setup(self) -> None:
        """Load the model; raises ConfigError for one without the head, the label, or the tokens."""
        super().setup()
        config, context = self.config, self.context
        if config.good_token is not None and config.bad_token is not None:
            self._model = RewardModel(config, context, "AutoModelForCausalLM")
            self._answers = [self._token_id("good_token"), self._token_id("bad_token")]
            self._label = 0
            return
        self._answers = []
        self._model = RewardModel(config, context, self._token_classifier)
        names = {int(number): str(name) for number, name in self._model.config.id2label.items()}
        label = 1 if config.label is None and len(names) == 2 else config.label
        if problem := labels_problem(context.role, label, names, "label"):
            raise ConfigError(problem)
        self._label = label_index(label, names)

    def step_scores(self, steps: list[list[str]], batch: Batch) -> list[StepScores]:
        """Between 0 and 1, but for a head with one number, which is given as it is."""
        prompts = prompts_of(batch, self._decode)
        rows = [self._encode(*each) for each in zip(uids_of(batch), prompts, steps, strict=True)]
        faults = [self._model.too_long(row) for row in rows]
        found = [StepScores.none(of_row, fault or "") for of_row, fault in zip(steps, faults, strict=True)]
        kept = [row for row, fault in enumerate(faults) if fault is None]
        for part, inputs in self._model.passes([rows[row] for row in kept]):
            places = [rows[kept[place]].places for place in part]
            for place, scores in zip(part, self._scores(inputs, places), strict=True):
                found[kept[place]] = _finite(scores)
        return found

    def _scores(self, inputs: dict[str, Any], places: Sequence[Sequence[int]]) -> list[list[float]]:
        """The scores at some places of each row."""
        import torch

        if self._answers:
            # Logits over a vocabulary, so at these places alone.
            wanted = sorted({place for of_row in places for place in of_row})
            at = {place: index for index, place in enumerate(wanted)}
            keep = torch.tensor(wanted, device=inputs["input_ids"].device)
            answers = self._model(inputs, only=self._answers, logits_to_keep=keep)
            scores = answers.softmax(-1)[..., self._label]
            return [scores[row, [at[place] for place in of_row]].tolist() for row, of_row in enumerate(places)]
        logits = self._model(inputs)
        scores = logits[..., 0] if logits.shape[-1] == 1 else logits.softmax(-1)[..., self._label]
        return [scores[row, list(of_row)].tolist() for row, of_row in enumerate(places)]

    def _encode(self, uid: str, prompt: Any, steps: list[str]) -> Encoded:
        """The tokens that the model reads, and which of them are behind the steps.

        Raises AlignmentError, naming the uid, where the text of a step's end is not the end of a token.
        """
        parts, ends, length = [], [], 0
        for step in steps:
            texts = {STEP: step, TOKEN: str(self.config.token)}
            pieces = [texts.get(piece, piece) for piece in _pieces(self.config.step_form)]
            ends.append(length + sum(map(len, pieces[: _pieces(self.config.step_form).index(TOKEN) + 1])))
            parts += pieces
            length += sum(map(len, pieces))
        content = "".join(parts)
        text = self._model.reader.text(prompt, content)
        start = text.rfind(content)
        if start < 0:  # a template may cut off what is blank at the ends
            start = text.rfind(content.strip()) - (len(content) - len(content.lstrip()))
        if content.strip() not in text:
            raise ConfigError(f"{self.context.role}.model: its chat template changes the response, so set prm.form")
        ids, offsets = self._model.reader.with_offsets(text)
        spans = np.asarray(offsets).reshape(-1, 2)
        return Encoded(ids, places=[self._place(uid, spans, start + end, text) for end in ends])

    def _place(self, uid: str, spans: np.ndarray[Any, Any], end: int, text: str) -> int:
        """The token that ends where a step's token does, `end` characters into the text."""
        holding = np.flatnonzero((spans[:, 0] < end) & (spans[:, 1] >= end))
        if not len(holding) or spans[holding[-1], 1] > end:
            around = text[max(0, end - 20) : end + 10]
            raise AlignmentError(
                f"row {uid}: no token of the model ends with {self.config.token!r} in {around!r}: give "
                f"{self.context.role}.token one that the tokenizer never joins with what follows"
            )
        return int(holding[-1])

    def _token_id(self, key: str) -> int:
        text = getattr(self.config, key)
        ids: list[int] = self._model.reader.tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise ConfigError(
                f"{self.context.role}.{key}={text!r} is {len(ids)} tokens of the model: give one that is one"
            )
        return ids[0]

    def _token_classifier(self) -> Any:
        """The class that can read the checkpoint."""
        import transformers

        config = transformers.AutoConfig.from_pretrained(self.config.folder)
        if "Qwen2ForProcessRewardModel" in (config.architectures or []):
            from roles.prm.qwen2 import Qwen2ForProcessRewardModel

            return Qwen2ForProcessRewardModel
        return transformers.AutoModelForTokenClassification


def _pieces(form: str) -> list[str]:
    """What stands in a form, marks and texts in order."""
    marks = _MARKS.findall(form)
    texts = _MARKS.split(form)
    return [texts[0], *(piece for mark, text in zip(marks, texts[1:], strict=True) for piece in (mark, text))]


def _finite(scores: list[float]) -> StepScores:
    """A number that is none (a model in half precision may overflow) is no score."""
    known = [score if math.isfinite(score) else None for score in scores]
    return StepScores(known, "not_finite" if None in known else None)
