"""Outcome rewards by a sequence classifier that vLLM runs.

vLLM is imported in `setup`, after the environment it reads at import is set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from rolegraph.batch import Batch
from rolegraph.errors import ConfigError, TurnError
from rolegraph.rewards.pool import Scores
from rolegraph.role import endpoint
from roles.orm.base import OneScoreORM, finite
from roles.orm.config import VLLMClassifierORMConfig
from roles.reward.config import label_index, labels_problem
from roles.reward.transformers_model import Reader
from roles.rollout import arguments

if TYPE_CHECKING:
    from vllm import LLMEngine

T = TypeVar("T")

TASK = "classify"


class PoolingEngine:
    """A vLLM engine that gives numbers for whole sequences, in a thread of its own that alone touches it."""

    def __init__(self, build: Callable[[], LLMEngine]) -> None:
        """Return once the engine is ready; raises what `build` raises."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vllm-pooling")
        self._count = 0
        self._engine = self._thread.submit(build).result()

    def call(self, command: Callable[[LLMEngine], T]) -> T:
        """Run `command` in the engine's thread; returns its result or raises what it raises."""
        return self._thread.submit(command, self._engine).result()

    def classify(self, rows: Sequence[list[int]]) -> list[list[float]]:
        """[rows, labels] logits of sequences of token ids."""
        return self.call(lambda engine: self._classify(engine, rows))

    def close(self) -> None:
        """Stop the engine and its worker processes."""
        shutdown = getattr(self._engine.engine_core, "shutdown", None)
        if shutdown is not None:
            self._thread.submit(shutdown).result()
        self._thread.shutdown()

    def _classify(self, engine: LLMEngine, rows: Sequence[list[int]]) -> list[list[float]]:
        from vllm import PoolingParams

        params = PoolingParams(task=TASK, use_activation=False)
        asked: list[str] = []
        """The requests, by the names the engine gives them."""
        found: dict[str, list[float]] = {}
        try:
            for ids in rows:
                self._count += 1
                prompt = {"type": "token", "prompt_token_ids": ids}
                key = str(self._count)
                request = engine.input_processor.process_inputs(
                    key, prompt, params, supported_tasks=engine.get_supported_tasks()
                )
                engine.add_request(key, request, params)
                asked.append(key)
            while engine.has_unfinished_requests():
                for output in engine.step():
                    found[output.request_id] = output.outputs.data.float().reshape(-1).tolist()
        except BaseException:
            engine.abort_request([key for key in asked if key not in found])
            raise
        return [found[key] for key in asked]


class VLLMClassifierORM(OneScoreORM):
    """A replica. It reads the prompt's messages and the response by the model's own chat template, or by `form`."""

    Config: ClassVar[type[VLLMClassifierORMConfig]] = VLLMClassifierORMConfig
    queue_rows: ClassVar[int] = 64
    queue_in_flight: ClassVar[int] = 2

    config: VLLMClassifierORMConfig

    def setup(self) -> None:
        """Start the engine; raises ConfigError for a model that vLLM does not serve as a classifier, or no label."""
        super().setup()
        config, context = self.config, self.context
        arguments.prepare_environment(config, context)
        self._label = self._find_label()
        self._reader = Reader(config.folder, config.form, context.role)
        self._reader.text("", "")
        args = arguments.engine_args(config, context, None)
        self._engine = PoolingEngine(lambda: arguments.build(config, context, args))
        self._asleep = False
        tasks, self._limit = self._engine.call(
            lambda engine: (engine.get_supported_tasks(), int(engine.model_config.max_model_len))
        )
        if TASK not in tasks:
            raise ConfigError(
                f"{context.role}.model={config.folder}: vLLM does not serve it as a classifier (it can do "
                f"{', '.join(tasks)}): give a sequence classifier, or choose {context.role}=classifier"
            )

    def teardown(self) -> None:
        """Stop the engine and its worker processes."""
        if hasattr(self, "_engine"):
            self._engine.close()

    def scores(self, prompts: list[Any], texts: list[str], batch: Batch) -> Scores:
        """The head's number for each response; too_long for one that the model has no positions for."""
        if self._asleep:
            raise TurnError(f"{self.context.role} has given its device away: call onload() before score")
        rows = [self._reader.ids(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
        kept = [row for row, ids in enumerate(rows) if len(ids) <= self._limit]
        found = Scores([None] * len(rows), [self._too_long(len(ids)) for ids in rows])
        for row, logits in zip(kept, self._engine.classify([rows[row] for row in kept]), strict=True):
            found.values[row] = self._value(logits)
        return finite(found)

    @endpoint()
    def offload(self) -> None:
        """Move the weights to host memory and drop the cache; without a GPU they stay where they are."""
        self._sleep(True)

    @endpoint()
    def onload(self) -> None:
        """Move the weights back to the GPU."""
        self._sleep(False)

    def _sleep(self, asleep: bool) -> None:
        on_gpu, role = self.context.device == "cuda", self.context.role
        if asleep and on_gpu and not self.config.enable_sleep_mode:
            raise TurnError(f"{role} was started without vLLM's sleep mode: set {role}.enable_sleep_mode=true")
        if on_gpu and asleep != self._asleep:
            self._engine.call(lambda engine: engine.sleep(level=1) if asleep else engine.wake_up())
        self._asleep = asleep

    def _too_long(self, tokens: int) -> str | None:
        return None if tokens <= self._limit else f"too_long: {tokens} tokens, and the model reads {self._limit}"

    def _value(self, logits: list[float]) -> float:
        if self.config.value == "logit" or any(math.isnan(logit) for logit in logits):
            return logits[self._label]
        if len(logits) == 1:
            return 0.5 * (1 + math.tanh(logits[0] / 2))  # a sigmoid that does not overflow
        largest = max(logits)
        return math.exp(logits[self._label] - largest) / sum(math.exp(logit - largest) for logit in logits)

    def _find_label(self) -> int:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self.config.folder)
        names = {int(number): str(name) for number, name in config.id2label.items()}
        if problem := labels_problem(self.context.role, self.config.label, names, "label"):
            raise ConfigError(problem)
        return label_index(self.config.label, names)
