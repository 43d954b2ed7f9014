"""Process rewards by a generative judge, behind an OpenAI-compatible endpoint or in a vLLM engine."""

from __future__ import annotations

from typing import ClassVar

from rolegraph.batch import Batch
from rolegraph.role import RoleContext, endpoint
from roles.prm.base import StepPRM, StepScores
from roles.prm.config import JudgePRMConfig
from roles.reward.judge import Judge, unread
from roles.reward.reading import prompts_of, texts_of
from roles.reward.replies import UnreadableError, read_steps


class JudgePRM(StepPRM):
    """A replica of the judge; subclass and override `read` for replies of another form.

    A reply without a score for each step leaves all of them null, with the reason and what came: which step a missing
    score was about cannot be told.
    """

    Config: ClassVar[type[JudgePRMConfig]] = JudgePRMConfig
    queue_rows: ClassVar[int] = 4
    queue_rows_alone: ClassVar[int] = 16

    config: JudgePRMConfig

    def __init__(self, config: JudgePRMConfig, context: RoleContext) -> None:
        super().__init__(config, context)
        self._judge = Judge(config, context)

    def setup(self) -> None:
        """Find the service, or start the engine."""
        super().setup()
        self._judge.start()

    def teardown(self) -> None:
        """Give up what is asked, and stop the engine."""
        self._judge.close()

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

    @endpoint()
    def offload(self) -> None:
        """Move an engine's weights to host memory; without a GPU they stay where they are."""
        self._judge.move(away=True)

    @endpoint()
    def onload(self) -> None:
        """Move them back."""
        self._judge.move(away=False)
