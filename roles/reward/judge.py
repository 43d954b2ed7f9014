"""Asking a judge: prompts from a template, replies from a service or from a vLLM engine in this process."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rolegraph.batch import Batch
from rolegraph.errors import ConfigError
from rolegraph.interfaces import SamplingParams
from rolegraph.role import Role, RoleContext, endpoint
from rolegraph.services.reply import Reply
from roles.reward.judge_config import GIVEN, JudgeConfig, names_in
from roles.reward.reading import Message, as_text
from roles.reward.replies import Bounds

if TYPE_CHECKING:
    from rolegraph.services.service import Service
    from roles.rollout.drawing import DrawingEngine

SEED_BITS = 31
"""Of the seeds that are sent: services differ in what they take, and all take a 32-bit integer."""


class Judge:
    """What a judge role asks, and how; it is one replica's."""

    def __init__(self, config: JudgeConfig, context: RoleContext) -> None:
        self.config = config
        self.context = context
        self.bounds = Bounds(config.lowest, config.highest)
        self._service: Service | None = None
        self._engine: DrawingEngine | None = None

    def start(self) -> None:
        """Find the service, or start the engine. Raises ConfigError where there is none to ask."""
        from jinja2 import StrictUndefined
        from jinja2.sandbox import SandboxedEnvironment

        environment = SandboxedEnvironment(undefined=StrictUndefined, autoescape=False)
        self._template = environment.from_string(self.config.prompt)
        self._columns = sorted(names_in(self.config.prompt) - {*GIVEN, *environment.globals})
        if self.config.service is not None:
            from rolegraph.services.service import Service

            self._service = Service(self.config.service)
            self._service.check()
            return
        self._start_engine()

    def close(self) -> None:
        """Give up what is asked, and stop the engine."""
        if self._service is not None:
            self._service.close()
        if self._engine is not None:
            self._engine.close()

    def move(self, away: bool) -> None:
        """Give the device to other roles, or take it back; a service holds none here."""
        if self._engine is None:
            return
        if away:
            self._engine.sleep(1)
        else:
            self._engine.wake_up(("weights", "kv_cache"))

    def ask(
        self, prompts: Sequence[Any], texts: Sequence[str], steps: Sequence[Sequence[str]], batch: Batch
    ) -> list[Reply]:
        """One reply a row: about its `prompts` and `texts`, and the steps in these. Raises TurnError while asleep."""
        if missing := [name for name in self._columns if name not in batch]:
            raise ConfigError(
                f"{self.context.role}.prompt names {missing[0]!r}, which the rows do not have: it may name "
                f"{', '.join(GIVEN)} and their columns ({', '.join(sorted(batch.column_names))})"
            )
        columns = {name: batch[name].to_pylist() for name in self._columns}
        chats: list[list[Message] | Reply] = []
        for row, (prompt, text, of_row) in enumerate(zip(prompts, texts, steps, strict=True)):
            given = {name: values[row] for name, values in columns.items()}
            chats.append(self._chat({**given, "question": as_text(prompt), "response": text, "steps": list(of_row)}))
        asked = [chat for chat in chats if not isinstance(chat, Reply)]
        replies = iter(self._ask_service(asked) if self._service is not None else self._ask_engine(asked))
        return [chat if isinstance(chat, Reply) else next(replies) for chat in chats]

    def _chat(self, values: dict[str, Any]) -> list[Message] | Reply:
        try:
            asked = self._template.render(values)
        except Exception as error:  # a template may do anything with a row that is not as it expects
            return Reply.of_fault(f"exception: {self.context.role}.prompt: {type(error).__name__}: {error}")
        system = self.config.system_prompt
        first: list[Message] = [{"role": "system", "content": system}] if system else []
        return [*first, {"role": "user", "content": asked}]

    def _seed(self, chat: Sequence[Message]) -> int | None:
        """Of a draw: the same whatever is asked beside it."""
        from roles.rollout.drawing import sample_seed

        if self.config.seed is None or not self.config.temperature:
            return None
        return sample_seed(self.config.seed, chat[-1]["content"], 0, 0)

    def _ask_service(self, chats: Sequence[list[Message]]) -> list[Reply]:
        config, service = self.config, self._service
        assert service is not None
        asked: list[Callable[[], Awaitable[Reply]]] = []
        for chat in chats:
            seed = self._seed(chat)
            asked.append(
                functools.partial(
                    service.chat,
                    chat,
                    temperature=config.temperature,
                    top_p=config.top_p,
                    max_tokens=config.max_tokens,
                    seed=None if seed is None else seed & (2**SEED_BITS - 1),
                )
            )
        return [_faulty(reply, "no_reply") for reply in service.run(asked)]

    def _start_engine(self) -> None:
        from roles.rollout.drawing import DrawingEngine

        self._engine = DrawingEngine(self.config, self.context)
        self._engine.start()
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(self.config.folder)
        if not self._tokenizer.chat_template:
            role = self.context.role
            raise ConfigError(f"{role}.model={self.config.folder} has no chat template: give a model that can be asked")

    def _ask_engine(self, chats: Sequence[list[Message]]) -> list[Reply]:
        from roles.rollout.drawing import Drawn

        config, engine = self.config, self._engine
        assert engine is not None
        engine.slumber.refuse_samples()
        sampling = SamplingParams(
            temperature=config.temperature,
            top_p=config.top_p,
            max_tokens=config.max_tokens,
            seed=config.seed if config.temperature else None,
        )
        prompts = [self._tokens(chat) for chat in chats]
        faults = [engine.why_not(np.asarray(prompt), sampling) for prompt in prompts]
        wanted = [
            Drawn(prompt, [self._seed(chat)])
            for prompt, chat, fault in zip(prompts, chats, faults, strict=True)
            if fault is None
        ]
        samples = iter(engine.draw(wanted, sampling))
        replies = []
        for fault in faults:
            if fault is not None:
                replies.append(Reply.of_fault(f"too_long: {fault}"))
                continue
            sample = next(samples)
            text = self._tokenizer.decode(list(sample.token_ids), skip_special_tokens=True)
            replies.append(Reply(text, sample.finish_reason, len(sample.token_ids)))
        return replies

    def _tokens(self, chat: Sequence[Message]) -> list[int]:
        text = self._tokenizer.apply_chat_template(list(chat), tokenize=False, add_generation_prompt=True)
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


class JudgeRole(Role):
    """What roles with a judge do alike; the kind of reward comes from a class beside it."""

    queue_rows: ClassVar[int] = 4
    queue_rows_alone: ClassVar[int] = 16

    def __init__(self, config: JudgeConfig, context: RoleContext) -> None:
        super().__init__(config, context)
        self._judge = Judge(config, context)

    def setup(self) -> None:
        """Find the service, or start the engine."""
        super().setup()
        self._judge.start()

    def teardown(self) -> None:
        """Give up what is asked, and stop the engine."""
        self._judge.close()

    @endpoint()
    def offload(self) -> None:
        """Move an engine's weights to host memory; without a GPU they stay where they are."""
        self._judge.move(away=True)

    @endpoint()
    def onload(self) -> None:
        """Move them back."""
        self._judge.move(away=False)


def unread(reply: Reply, why: str) -> str:
    """Why a reply gave no score."""
    return f"unparsable: {why}" + (" (it was cut off at max_tokens)" if reply.finish_reason == "length" else "")


def _faulty(reply: Reply, word: str) -> Reply:
    return reply if reply.fault is None else Reply.of_fault(f"{word}: {reply.fault}")
