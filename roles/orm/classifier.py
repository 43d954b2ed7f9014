"""Outcome rewards by a sequence classifier that transformers runs."""

from __future__ import annotations

from typing import Any, ClassVar

from rolegraph.batch import Batch
from rolegraph.errors import ConfigError
from rolegraph.rewards.pool import Scores
from roles.orm.base import OneScoreORM, finite
from roles.orm.config import ClassifierORMConfig
from roles.reward.config import label_index, labels_problem
from roles.reward.transformers_model import RewardModel, RewardModelRole


class ClassifierORM(RewardModelRole, OneScoreORM):
    """A replica of the classifier.

    It reads the prompt's messages and the response by its own chat template, by `form`, or, where it has no template,
    as a pair of texts.
    """

    Config: ClassVar[type[ClassifierORMConfig]] = ClassifierORMConfig

    config: ClassifierORMConfig

    def setup(self) -> None:
        """Load the model; raises ConfigError for one without a classifier's head, or without the label."""
        super().setup()
        self._model = RewardModel(self.config, self.context, "AutoModelForSequenceClassification")
        names = {int(number): str(name) for number, name in self._model.config.id2label.items()}
        if problem := labels_problem(self.context.role, self.config.label, names, "label"):
            raise ConfigError(problem)
        self._label = label_index(self.config.label, names)

    def scores(self, prompts: list[Any], texts: list[str], batch: Batch) -> Scores:
        """The head's number for each response; too_long for one that the model has no positions for."""
        rows = [self._model.reader.encode(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
        reasons = [self._model.too_long(row) for row in rows]
        values: list[float | None] = [None] * len(rows)
        kept = [row for row, reason in enumerate(reasons) if reason is None]
        for part, inputs in self._model.passes([rows[row] for row in kept]):
            for place, value in zip(part, self._values(self._model(inputs)).tolist(), strict=True):
                values[kept[place]] = value
        return finite(Scores(values, reasons))

    def _values(self, logits: Any) -> Any:
        """[rows] from [rows, labels]."""
        if self.config.value == "probability":
            logits = logits.sigmoid() if logits.shape[1] == 1 else logits.softmax(-1)
        return logits[:, self._label]
