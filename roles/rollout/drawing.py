"""Drawing from prompts: a vLLM engine as rollout and sampler have it, weight sync aside, and what rollouts share."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

from rolegraph.batch import Batch
from rolegraph.columns import Ragged
from rolegraph.errors import BatchError, TurnError
from rolegraph.interfaces import SamplingParams
from rolegraph.role import RoleContext
from roles.rollout import arguments
from roles.rollout.config import VLLMDrawingConfig
from roles.rollout.engine import EngineThread, Request, Sample
from roles.rollout.slumber import Slumber

if TYPE_CHECKING:
    from vllm import LLMEngine
    from vllm import SamplingParams as EngineSampling

log = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]


def sample_seed(seed: int, uid: str, step: int, repeat: int) -> int:
    """The seed of one sample (63 bits): the same on every replica and in every batch.

    >>> sample_seed(1, "a", 0, 0) == sample_seed(1, "a", 0, 0) != sample_seed(1, "a", 0, 1)
    True
    """
    text = f"{seed}\0{step}\0{repeat}\0{uid}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class Drawn:
    """Responses to be drawn from one prompt."""

    prompt: list[int]
    seeds: Sequence[int | None]
    """One a response."""


class DrawingEngine:
    """One replica's engine, its sleep, and what the model says of its tokens.

    Logprobs are those of the distribution the tokens were drawn from: softmax(logits / temperature), cut and
    renormalised by `top_p`, `top_k` and `min_p`. Ids that the tokenizer does not have are never drawn. At temperature 0
    tokens are the most likely ones, logprobs those of temperature 1.
    """

    thread: EngineThread

    def __init__(self, config: VLLMDrawingConfig, context: RoleContext) -> None:
        self.config = config
        self.context = context
        self.slumber = Slumber()
        self._said: set[str] = set()

    def start(self) -> None:
        """Start the engine; vLLM is imported here, after the environment it reads at import is set."""
        config, context = self.config, self.context
        arguments.prepare_environment(config, context)
        limit = arguments.tokenizer_size(config.folder)
        self._vocabulary = arguments.vocabulary_size(config.folder)
        self._eos = arguments.eos_token_ids(config.folder)
        args = arguments.engine_args(config, context, limit)
        self.thread = EngineThread(lambda: arguments.build(config, context, args))
        self._max_model_len = self.thread.call(lambda engine: int(engine.model_config.max_model_len))

    def close(self) -> None:
        """Stop the engine and its worker processes."""
        if hasattr(self, "thread"):
            self.thread.close()

    def why_not(self, prompt: Array, sampling: SamplingParams) -> str | None:
        """Why nothing can be drawn from this prompt; null where it can."""
        length = len(prompt)
        if length == 0:
            return "the prompt is empty"
        if length + sampling.max_tokens > self._max_model_len:
            return (
                f"a prompt of {length} tokens and max_tokens={sampling.max_tokens} exceed "
                f"max_model_len={self._max_model_len}; raise {self.context.role}.max_model_len or lower data.max_length"
            )
        return arguments.strange_token_id("prompt", prompt, self._vocabulary)

    def draw(self, wanted: Sequence[Drawn], sampling: SamplingParams) -> list[Sample]:
        """The responses, prompt after prompt; safe to call from many threads at once."""
        params = self._engine_sampling(sampling)
        requests = [Request(one.prompt, params, seed) for one in wanted for seed in one.seeds]
        return self.thread.submit(requests).result()

    def sleep(self, level: int) -> None:
        """See `RolloutRole.sleep`; raises TurnError while samples are being drawn.

        On a CPU vLLM has no memory to give back: there the engine only refuses what it would refuse on a GPU.
        """
        role = self.context.role
        if self.context.device == "cuda" and level > 0 and not self.config.enable_sleep_mode:
            raise TurnError(
                f"{role} was started without vLLM's sleep mode: set {role}.enable_sleep_mode=true, or null and "
                "placement.sleep_level"
            )

        def fall_asleep(engine: LLMEngine) -> None:
            if running := self.thread.running:
                raise TurnError(f"{running} samples are being drawn: await them, or abort them, before sleep")
            if not self.slumber.begin(level):
                return
            if self.context.device == "cuda":
                engine.sleep(level=level)
            else:
                self.say_once(
                    logging.INFO, "a vLLM engine on a CPU has no memory to give back: asleep, it only refuses to work"
                )
                engine.reset_prefix_cache()

        self.thread.call(fall_asleep)

    def wake_up(self, parts: tuple[str, ...]) -> None:
        """See `RolloutRole.wake_up`; weights dropped at level 2 get their memory here and their content by a sync."""

        def wake(engine: LLMEngine) -> None:
            waking = self.slumber.to_wake(parts)
            if waking and self.context.device == "cuda":
                engine.wake_up(tags=waking)
            self.slumber.woke(waking)

        self.thread.call(wake)

    def say_once(self, level: int, text: str) -> None:
        """Log what is no news the second time."""
        if text not in self._said:
            self._said.add(text)
            log.log(level, text)

    def _engine_sampling(self, sampling: SamplingParams) -> EngineSampling:
        from vllm import SamplingParams as EngineSampling
        from vllm.sampling_params import RequestOutputKind

        stop = [*sampling.stop_token_ids, *([] if sampling.ignore_eos else self._eos)]
        return EngineSampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=sampling.max_tokens,
            # The model's own end ids are among these, so that all of them end a response in the same way.
            stop_token_ids=sorted(set(stop)),
            ignore_eos=True,
            logprobs=0,
            seed=None if sampling.seed is None else 0,  # each request brings its own; vLLM remembers that it has one
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


def token_columns(rows: Batch, drawn: Sequence[tuple[Sequence[int], Sequence[float]]]) -> dict[str, Any]:
    """The columns of what was drawn, as tokens and their logprobs a row of `rows`, which have the `prompt_ids`."""
    lengths = np.fromiter((len(tokens) for tokens, _ in drawn), dtype=np.int32, count=len(drawn))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    total = int(offsets[-1])
    prompt_lengths = rows.ragged("prompt_ids").lengths.astype(np.int32)

    def flat(values: Iterator[Any], kind: type[np.generic]) -> Ragged:
        return Ragged(np.fromiter(values, dtype=kind, count=total), offsets)

    return {
        "response_ids": flat((token for tokens, _ in drawn for token in tokens), np.int32),
        "response_mask": Ragged(np.ones(total, dtype=np.uint8), offsets),
        "rollout_logprobs": flat((value for _, logprobs in drawn for value in logprobs), np.float32),
        "prompt_length": prompt_lengths,
        "response_length": lengths,
        "length": prompt_lengths + lengths,
    }


class Drawer(Protocol):
    """What draws samples, whichever engine it is."""

    def why_not(self, prompt: Array, sampling: SamplingParams) -> str | None:
        """Why nothing can be drawn from this prompt; null where it can."""

    def draw(self, wanted: Sequence[Drawn], sampling: SamplingParams) -> list[Sample]:
        """The responses, prompt after prompt."""

    def say_once(self, level: int, text: str) -> None:
        """Log what is no news the second time."""


def generate(engine: Drawer, prompts: Batch, sampling: SamplingParams) -> Batch:
    """`RolloutRole.generate` by an engine that is awake and whole; raises BatchError as that says."""
    if sampling.n < 1:
        raise BatchError(f"sampling.n={sampling.n}: at least one response a prompt")
    if sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0:
        engine.say_once(
            logging.WARNING,
            "top_p, top_k or min_p cut the distribution: rollout_logprobs are renormalised over what is kept, the "
            "trainer's logprobs are not, so they differ even for equal weights",
        )
    ids = prompts.lists("prompt_ids")
    uids: list[str] = prompts["uid"].to_pylist()
    for uid, prompt in zip(uids, ids, strict=True):
        if why := engine.why_not(prompt, sampling):
            raise BatchError(f"row {uid}: {why}")

    def seed(uid: str, repeat: int) -> int | None:
        return None if sampling.seed is None else sample_seed(sampling.seed, uid, sampling.step, repeat)

    wanted = [
        Drawn(prompt.tolist(), [seed(uid, repeat) for repeat in range(sampling.n)])
        for uid, prompt in zip(uids, ids, strict=True)
    ]
    return _with_samples(prompts.repeat(sampling.n), engine.draw(wanted, sampling), sampling)


def _with_samples(rows: Batch, samples: list[Sample], sampling: SamplingParams) -> Batch:
    """The prompts' rows, each `sampling.n` times, with the columns of what was drawn."""
    count = len(samples)
    return rows.with_columns(
        {
            "repeat": np.tile(np.arange(sampling.n, dtype=np.int32), count // sampling.n),
            "step": np.full(count, sampling.step, dtype=np.int32),
            "finish_reason": pa.array([sample.finish_reason for sample in samples], pa.string()),
            "weight_version": np.fromiter((s.version_first for s in samples), dtype=np.int64, count=count),
            "weight_version_last": np.fromiter((s.version_last for s in samples), dtype=np.int64, count=count),
            **token_columns(rows, [(sample.token_ids, sample.logprobs) for sample in samples]),
        }
    )
