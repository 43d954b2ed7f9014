"""Process rewards by a generative judge, behind an OpenAI-compatible endpoint or in a vLLM engine."""

from __future__ import annotations

from typing import ClassVar

from rolegraph.batch import Batch
from roles.prm.base import StepPRM, StepScores
from roles.prm.config import JudgePRMConfig
from roles.reward.judge import JudgeRole, unread
from roles.reward.reading import prompts_of, texts_of
from roles.reward.replies import UnreadableError, read_steps


class JudgePRM(JudgeRole, StepPRM):
    """A replica of the judge; subclass and override `read` for replies of another form.

    A reply without a score for each step leaves all of them null, with the reason and what came: which step a missing
    score was about cannot be told.
    """

    Config: ClassVar[type[JudgePRMConfig]] = JudgePRMConfig

    config: JudgePRMConfig

    def read(self, reply: str, steps: int) -> list[float | None]:
        """The score of each step in a reply; raises UnreadableError for one without."""
        return read_steps(reply, steps, self._judge.bounds, self.config.pattern)

    def step_scores(self, steps: list[list[str]], batch: Batch) -> list[StepScores]:
        """The judge's scores; it is asked about steps alone where a row has some."""
        texts = [text or "" for text in texts_of(batch, self._decode)]
        replies = self._judge.ask(prompts_of(batch, self._decode), texts, steps, batch)
        found = []
        for of_row, reply in zip(steps, replies, strict=True):
            if reply.text is None:
                found.append(StepScores.none(of_row, reply.fault or "no_reply"))
                continue
            try:
                found.append(StepScores(self.read(reply.text, len(of_row))))
            except UnreadableError as error:
                found.append(StepScores.none(of_row, unread(reply, str(error))))
        return found
