"""Outcome rewards by a generative judge, behind an OpenAI-compatible endpoint or in a vLLM engine."""

from __future__ import annotations

from typing import Any, ClassVar

from rolegraph.batch import Batch
from rolegraph.rewards.pool import Scores
from rolegraph.rewards.steps import split_steps
from roles.orm.base import OneScoreORM
from roles.orm.config import JudgeORMConfig
from roles.reward.judge import JudgeRole, unread
from roles.reward.replies import UnreadableError, read_score


class JudgeORM(JudgeRole, OneScoreORM):
    """A replica of the judge; subclass and override `read` for replies of another form.

    A reply without a score is a null with its reason (`unparsable`, and what came), never a 0.
    """

    Config: ClassVar[type[JudgeORMConfig]] = JudgeORMConfig

    config: JudgeORMConfig

    def read(self, reply: str) -> float:
        """The score in a reply; raises UnreadableError for one without."""
        return read_score(reply, self._judge.bounds, self.config.pattern)

    def scores(self, prompts: list[Any], texts: list[str], batch: Batch) -> Scores:
        """The judge's score of each response."""
        found = Scores([], [])
        for reply in self._judge.ask(prompts, texts, [split_steps(text) for text in texts], batch):
            value, reason = None, reply.fault
            if reply.text is not None:
                try:
                    value = self.read(reply.text)
                except UnreadableError as error:
                    reason = unread(reply, str(error))
            found.values.append(value)
            found.reasons.append(reason)
        return found
