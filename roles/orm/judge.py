"""Outcome rewards by a generative judge, behind an OpenAI-compatible endpoint or in a vLLM engine."""

from __future__ import annotations

from typing import Any, ClassVar

from rolegraph.batch import Batch
from rolegraph.rewards.pool import Scores
from rolegraph.rewards.steps import split_steps
from rolegraph.role import RoleContext, endpoint
from roles.orm.base import OneScoreORM
from roles.orm.config import JudgeORMConfig
from roles.reward.judge import Judge, unread
from roles.reward.replies import UnreadableError, read_score


class JudgeORM(OneScoreORM):
    """A replica of the judge; subclass and override `read` for replies of another form.

    A reply without a score is a null with its reason (`unparsable`, and what came), never a 0.
    """

    Config: ClassVar[type[JudgeORMConfig]] = JudgeORMConfig
    queue_rows: ClassVar[int] = 4
    queue_rows_alone: ClassVar[int] = 16

    config: JudgeORMConfig

    def __init__(self, config: JudgeORMConfig, context: RoleContext) -> None:
        super().__init__(config, context)
        self._judge = Judge(config, context)

    def setup(self) -> None:
        """Find the service, or start the engine."""
        super().setup()
        self._judge.start()

    def teardown(self) -> None:
        """Give up what is asked, and stop the engine."""
        self._judge.close()

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

    @endpoint()
    def offload(self) -> None:
        """Move an engine's weights to host memory; without a GPU they stay where they are."""
        self._judge.move(away=True)

    @endpoint()
    def onload(self) -> None:
        """Move them back."""
        self._judge.move(away=False)
