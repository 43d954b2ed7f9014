"""A teacher that vLLM runs: top-K logprobs of a response that the engine reads as part of its prompt.

vLLM is imported in `setup`, after the environment it reads at import is set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rolegraph.batch import Batch
from rolegraph.columns import Ragged
from rolegraph.errors import BatchError, ConfigError, TurnError
from rolegraph.interfaces import HeadInfo, TeacherRole
from rolegraph.role import endpoint
from roles.rollout import arguments
from roles.rollout.engine import EngineThread, Request
from roles.teacher.config import VLLMTeacherConfig
from roles.teacher.prompt_logprobs import Scores, response_scores

if TYPE_CHECKING:
    from vllm import LLMEngine
    from vllm import SamplingParams as EngineSampling

Array = np.ndarray[Any, Any]


class VLLMTeacher(TeacherRole):
    """A replica. Logprobs are those of temperature 1, whatever the engine samples at; hidden states there are none.

    A row with the same prompt and response as another of the call is scored once. K above the model's vocabulary leaves
    the last entries of each token empty (id -1, logprob -inf).
    """

    Config: ClassVar[type[VLLMTeacherConfig]] = VLLMTeacherConfig
    config: VLLMTeacherConfig
    queue_rows: ClassVar[int] = 16
    queue_in_flight: ClassVar[int] = 4

    def setup(self) -> None:
        """Start the engine."""
        config, context = self.config, self.context
        arguments.prepare_environment(config, context)
        self._vocabulary = arguments.vocabulary_size(config.folder)
        self._asleep = False
        args = arguments.engine_args(config, context, None)
        self._engine = EngineThread(lambda: arguments.build(config, context, args))
        self._max_model_len = self._engine.call(lambda engine: int(engine.model_config.max_model_len))

    def teardown(self) -> None:
        """Stop the engine and its worker processes."""
        if hasattr(self, "_engine"):
            self._engine.close()

    @endpoint(dispatch="queue")
    def score(self, batch: Batch, *, topk: int = 0, hidden: bool = False, temperature: float = 1.0) -> Batch:
        """See `TeacherRole.score`.

        Raises ConfigError for what the engine does not give: hidden states, another temperature, more than
        `max_logprobs` tokens a position; BatchError, naming the uid, for a row that is empty, too long, or of other
        ids; AlignmentError, naming the uid, where the engine's answer is not about the row's tokens.
        """
        self._refuse(topk, hidden, temperature)
        if self._asleep:
            raise TurnError(f"{self.context.role} has given its device away: call onload() before score")
        from roles.train.teaching import seen_by_teacher

        rows = seen_by_teacher(batch)
        uids: list[str] = rows["uid"].to_pylist()
        pairs = list(zip(rows.lists("prompt_ids"), rows.lists("response_ids"), strict=True))
        params = self._engine_sampling(topk)
        asked: dict[tuple[bytes, bytes], int] = {}
        """The request of each pair of prompt and response."""
        request_of: list[int | None] = []
        """The request of each row; null for one without a response."""
        requests: list[Request] = []
        first: list[tuple[str, Array, Array]] = []
        for uid, (prompt, response) in zip(uids, pairs, strict=True):
            if not len(response):
                request_of.append(None)
                continue
            number = asked.setdefault((prompt.tobytes(), response.tobytes()), len(requests))
            request_of.append(number)
            if number == len(requests):
                self._check_row(uid, prompt, response)
                requests.append(Request([*prompt.tolist(), *response.tolist()], params))
                first.append((uid, prompt, response))
        samples = self._engine.submit(requests).result()
        found = []
        for sample, (uid, prompt, response) in zip(samples, first, strict=True):
            if sample.prompt is None:
                raise BatchError(f"row {uid}: the engine scored no prompt; its request ended as {sample.finish_reason}")
            found.append(response_scores(sample.prompt, len(prompt), response, topk, uid))
        nothing = Scores.of_nothing(topk)
        return _columns([nothing if number is None else found[number] for number in request_of], topk)

    @endpoint(execute="first")
    def head(self) -> tuple[Batch, HeadInfo]:
        """Raises ConfigError: the engine keeps its output head to itself."""
        raise ConfigError(_no_hidden(self.context.role))

    @endpoint()
    def offload(self) -> None:
        """Move the weights to host memory and drop the KV cache; without a GPU they stay where they are."""
        self._sleep(True)

    @endpoint()
    def onload(self) -> None:
        """Move the weights back to the GPU."""
        self._sleep(False)

    def _sleep(self, asleep: bool) -> None:
        if asleep and self.context.device == "cuda" and not self.config.enable_sleep_mode:
            role = self.context.role
            raise TurnError(
                f"{role} was started without vLLM's sleep mode: set {role}.enable_sleep_mode=true, or null and "
                "placement.offload_teacher_model"
            )

        def change(engine: LLMEngine) -> None:
            if running := self._engine.running:
                raise TurnError(f"{running} rows are being scored: await score before offload")
            if asleep != self._asleep and self.context.device == "cuda":
                if asleep:
                    engine.sleep(level=1)
                else:
                    engine.wake_up()
            self._asleep = asleep

        self._engine.call(change)

    def _refuse(self, topk: int, hidden: bool, temperature: float) -> None:
        role, limit = self.context.role, self.config.max_logprobs
        if hidden:
            raise ConfigError(_no_hidden(role))
        if temperature != 1.0:
            raise ConfigError(
                f"{role} is asked for logprobs at temperature {temperature:g}, and vLLM gives those of temperature 1 "
                f"for the tokens of a prompt: set algorithm.temperature=1, or choose {role}=huggingface or megatron"
            )
        if topk < 0 or (limit is not None and topk > limit):
            raise ConfigError(
                f"{role} is asked for {topk} tokens a position, and {role}.max_logprobs={limit}: raise it, or lower "
                "algorithm.gkd_logits_topk"
            )

    def _check_row(self, uid: str, prompt: Array, response: Array) -> None:
        if not len(prompt):
            raise BatchError(f"row {uid}: the prompt is empty, and nothing comes before its response")
        need = len(prompt) + len(response) + 1  # the engine draws a token
        if need > self._max_model_len:
            raise BatchError(
                f"row {uid}: a prompt of {len(prompt)} tokens, a response of {len(response)}, and the one that the "
                f"engine draws exceed max_model_len={self._max_model_len}; raise {self.context.role}.max_model_len"
            )
        arguments.check_token_ids(uid, "prompt", prompt, self._vocabulary)
        arguments.check_token_ids(uid, "response", response, self._vocabulary)

    def _engine_sampling(self, topk: int) -> EngineSampling:
        from vllm import SamplingParams as EngineSampling
        from vllm.sampling_params import RequestOutputKind

        return EngineSampling(
            temperature=0.0,
            max_tokens=1,
            ignore_eos=True,
            logprobs=0,
            prompt_logprobs=min(topk, self._vocabulary),
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


def _no_hidden(role: str) -> str:
    return (
        f"{role} is a vLLM engine, which gives top-K logprobs alone, neither hidden states nor its output head: set "
        f"algorithm.gkd_logits_topk=64, or choose {role}=huggingface or megatron"
    )


def _columns(scores: list[Scores], topk: int) -> Batch:
    """The scores of each row as columns."""
    offsets = np.cumsum([0, *(len(one.token_logprobs) for one in scores)])

    def ragged(parts: list[Array]) -> Ragged:
        return Ragged(np.concatenate(parts), offsets)

    scores = scores or [Scores.of_nothing(topk)]
    columns = {"teacher_token_logprobs": ragged([one.token_logprobs for one in scores])}
    if topk:
        columns["teacher_ids"] = ragged([one.ids for one in scores])
        columns["teacher_logprobs"] = ragged([one.logprobs for one in scores])
    return Batch.from_columns(columns)
