"""Sampling from the policy with vLLM: one engine a replica, tensor parallelism inside it.

vLLM is imported in `setup`, after the environment it reads at import is set.
"""

from __future__ import annotations

import hashlib
import logging
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rolegraph.batch import Batch
from rolegraph.errors import BatchError, TurnError, WeightSyncError
from rolegraph.interfaces import RolloutRole, SamplingParams, TensorInfo, TransferGroup
from rolegraph.role import RoleContext, endpoint
from roles.rollout import arguments
from roles.rollout.config import VLLMRolloutConfig
from roles.rollout.engine import EngineThread, Request, Sample
from roles.rollout.slumber import Slumber

if TYPE_CHECKING:
    from vllm import LLMEngine
    from vllm import SamplingParams as EngineSampling

log = logging.getLogger(__name__)


def sample_seed(seed: int, uid: str, step: int, repeat: int) -> int:
    """The seed of one sample (63 bits): the same on every replica and in every batch.

    >>> sample_seed(1, "a", 0, 0) == sample_seed(1, "a", 0, 0) != sample_seed(1, "a", 0, 1)
    True
    """
    text = f"{seed}\0{step}\0{repeat}\0{uid}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class VLLMRollout(RolloutRole):
    """A replica. `rollout_logprobs` are those of the distribution the tokens were drawn from.

    That is softmax(logits / temperature), which is also what the trainer computes. With `top_p`, `top_k` or `min_p` it
    is cut and renormalised, so a token's rollout logprob lies above the trainer's by the logarithm of the mass that was
    kept; a warning says so. Ids that the tokenizer does not have are never drawn; the mass a model puts on them is
    renormalised away likewise. At temperature 0 tokens are the most likely ones, logprobs those of temperature 1.
    """

    Config = VLLMRolloutConfig
    config: VLLMRolloutConfig

    def __init__(self, config: VLLMRolloutConfig, context: RoleContext) -> None:
        super().__init__(config, context)
        self._torn: str | None = None
        """Why the engine's weights are partly new and partly old."""
        self._slumber = Slumber()
        self._said: set[str] = set()

    def setup(self) -> None:
        """Start the engine."""
        config, context = self.config, self.context
        arguments.prepare_environment(config, context)
        model = config.folder
        limit = arguments.tokenizer_size(model)
        self._vocabulary = arguments.vocabulary_size(model)
        self._eos = arguments.eos_token_ids(model)
        self._weights = arguments.weight_shapes(model)
        args = arguments.engine_args(config, context, limit)
        self._engine = EngineThread(lambda: arguments.build(config, context, args))
        self._max_model_len = self._engine.call(lambda engine: int(engine.model_config.max_model_len))

    def teardown(self) -> None:
        """Stop the engine and its worker processes."""
        if hasattr(self, "_engine"):
            self._engine.close()

    @endpoint(dispatch="queue")
    def generate(self, prompts: Batch, sampling: SamplingParams) -> Batch:
        """See `RolloutRole.generate`; safe to call from many threads at once.

        Raises BatchError, naming the uid, for a prompt that is empty, has ids the model lacks, or leaves no room for
        `sampling.max_tokens` within `max_model_len`; TurnError while the engine is asleep or its weights are dropped.
        """
        self._slumber.refuse_samples()
        if self._torn:
            raise WeightSyncError(f"the engine's weights are incomplete until the next sync: {self._torn}")
        if sampling.n < 1:
            raise BatchError(f"sampling.n={sampling.n}: at least one response a prompt")
        self._warn_of_cut(sampling)
        ids = prompts.lists("prompt_ids")
        uids: list[str] = prompts["uid"].to_pylist()
        for uid, prompt in zip(uids, ids, strict=True):
            self._check_prompt(uid, prompt, sampling)
        base = self._engine_sampling(sampling)
        requests = []
        for uid, prompt in zip(uids, ids, strict=True):
            tokens = prompt.tolist()
            for repeat in range(sampling.n):
                seed = None if sampling.seed is None else sample_seed(sampling.seed, uid, sampling.step, repeat)
                requests.append(Request(tokens, base, seed))
        samples = self._engine.submit(requests).result()
        return _with_samples(prompts, samples, sampling)

    @endpoint(lane="control")
    def abort(self) -> int:
        """See `RolloutRole.abort`; waits for the engine step in progress."""
        return self._engine.abort()

    @endpoint()
    def transfer_workers(self) -> tuple[int, int]:
        """See `RolloutRole.transfer_workers`."""
        return self.context.rank, self.config.tensor_parallel_size

    @endpoint()
    def connect_weights(self, group: TransferGroup) -> None:
        """See `RolloutRole.connect_weights`; raises WeightSyncError when a worker cannot join."""
        first = group.offsets[self.context.rank]
        self._raise(self._engine.call(lambda engine: engine.collective_rpc("stream_connect", args=(group, first))))

    @endpoint()
    def receive_weights(self, manifest: list[TensorInfo], bucket_bytes: int, version: int) -> float:
        """See `RolloutRole.receive_weights`.

        Raises WeightSyncError naming the weight that is missing, unknown or misshapen, and TurnError while the weights
        are asleep. If the transfer broke after the first weights had been loaded, `generate` refuses until a later sync
        succeeds.
        """
        started = time.monotonic()
        try:
            self._slumber.refuse_weights()
            self._check_manifest(manifest)
        except (TurnError, WeightSyncError):
            VLLMRollout.disconnect_weights(self)  # the trainer is already sending
            raise

        def receive(engine: LLMEngine) -> None:
            answers: list[tuple[str | None, bool]] = engine.collective_rpc("stream_receive", args=(manifest,))
            faults = [fault for fault, _ in answers]
            if any(faults):
                whole = all(whole for _, whole in answers) and all(faults)
                self._torn = self._torn if whole else next(fault for fault in faults if fault)
                self._raise(faults)
            self._torn = None
            self._slumber.filled()
            # Running samples go on with the new weights, from a cache computed anew.
            if not engine.reset_prefix_cache(reset_running_requests=True):
                raise WeightSyncError("vLLM did not reset its prefix cache")
            self._engine.take_version(version)
            self._engine.date_unstarted()

        self._engine.call(receive)
        return time.monotonic() - started

    @endpoint()
    def disconnect_weights(self) -> None:
        """See `RolloutRole.disconnect_weights`."""
        self._engine.call(lambda engine: engine.collective_rpc("stream_disconnect"))

    @endpoint()
    def sleep(self, level: int) -> None:
        """See `RolloutRole.sleep`; raises TurnError while samples are being drawn.

        On a CPU vLLM has no memory to give back: there the engine only refuses what it would refuse on a GPU.
        """
        if self.context.device == "cuda" and level > 0 and not self.config.enable_sleep_mode:
            raise TurnError(
                f"{self.context.role} was started without vLLM's sleep mode: set {self.context.role}.enable_sleep_mode"
                "=true, or null and placement.sleep_level"
            )

        def fall_asleep(engine: LLMEngine) -> None:
            if running := self._engine.running:
                raise TurnError(f"{running} samples are being drawn: await generate, or call abort(), before sleep")
            if not self._slumber.begin(level):
                return
            if self.context.device == "cuda":
                engine.sleep(level=level)
            else:
                self._say_once(
                    logging.INFO, "a vLLM engine on a CPU has no memory to give back: asleep, it only refuses to work"
                )
                engine.reset_prefix_cache()

        self._engine.call(fall_asleep)

    @endpoint()
    def wake_up(self, parts: tuple[str, ...]) -> None:
        """See `RolloutRole.wake_up`; weights dropped at level 2 get their memory here and their content by a sync."""

        def wake(engine: LLMEngine) -> None:
            waking = self._slumber.to_wake(parts)
            if waking and self.context.device == "cuda":
                engine.wake_up(tags=waking)
            self._slumber.woke(waking)

        self._engine.call(wake)

    def _raise(self, faults: list[str | None]) -> None:
        for worker, fault in enumerate(faults):
            if fault:
                raise WeightSyncError(f"{self.context.role} replica {self.context.rank}, worker {worker}: {fault}")

    def _check_manifest(self, manifest: list[TensorInfo]) -> None:
        """Compare what the trainer announces with the checkpoint the engine was started from."""
        if self._weights is None:
            return
        announced = {info.name: tuple(info.shape) for info in manifest}
        expected = {name: shape for name, shape in self._weights.items() if not name.endswith("rotary_emb.inv_freq")}
        if arguments.model_config(self.config.folder).get("tie_word_embeddings"):
            expected.pop("lm_head.weight", None)
            announced.pop("lm_head.weight", None)
        wrong = [f"missing {name}" for name in expected if name not in announced]
        wrong += [f"unknown {name}" for name in announced if name not in expected]
        wrong += [
            f"{name} has shape {list(announced[name])}, the model wants {list(shape)}"
            for name, shape in expected.items()
            if name in announced and announced[name] != shape
        ]
        if wrong:
            more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise WeightSyncError(f"the trainer's weights are not those of the model: {'; '.join(wrong[:5])}{more}")

    def _check_prompt(self, uid: str, prompt: np.ndarray[Any, Any], sampling: SamplingParams) -> None:
        length = len(prompt)
        if length == 0:
            raise BatchError(f"row {uid}: the prompt is empty")
        if length + sampling.max_tokens > self._max_model_len:
            raise BatchError(
                f"row {uid}: a prompt of {length} tokens and max_tokens={sampling.max_tokens} exceed "
                f"max_model_len={self._max_model_len}; raise rollout.max_model_len or lower data.max_length"
            )
        arguments.check_token_ids(uid, "prompt", prompt, self._vocabulary)

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

    def _warn_of_cut(self, sampling: SamplingParams) -> None:
        if sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0:
            self._say_once(
                logging.WARNING,
                "top_p, top_k or min_p cut the distribution: rollout_logprobs are renormalised over what is kept, the "
                "trainer's logprobs are not, so they differ even for equal weights",
            )

    def _say_once(self, level: int, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            log.log(level, text)


def _with_samples(prompts: Batch, samples: list[Sample], sampling: SamplingParams) -> Batch:
    """The prompts' rows, each `sampling.n` times, with the columns of what was drawn."""
    rows = len(samples)
    lengths = np.fromiter((len(sample.token_ids) for sample in samples), dtype=np.int32, count=rows)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    total = int(lengths.sum())

    def ragged(values: np.ndarray[Any, Any]) -> pa.Array:
        return pa.ListArray.from_arrays(offsets, pa.array(values))

    tokens = np.fromiter((token for s in samples for token in s.token_ids), dtype=np.int32, count=total)
    logprobs = np.fromiter((value for s in samples for value in s.logprobs), dtype=np.float32, count=total)
    batch = prompts.repeat(sampling.n)
    prompt_lengths = np.repeat(np.asarray([len(ids) for ids in prompts.lists("prompt_ids")], np.int32), sampling.n)
    return batch.with_columns(
        {
            "repeat": np.tile(np.arange(sampling.n, dtype=np.int32), len(prompts)),
            "step": np.full(rows, sampling.step, dtype=np.int32),
            "response_ids": ragged(tokens),
            "response_mask": ragged(np.ones(total, dtype=np.uint8)),
            "rollout_logprobs": ragged(logprobs),
            "finish_reason": pa.array([sample.finish_reason for sample in samples], pa.string()),
            "weight_version": np.fromiter((s.version_first for s in samples), dtype=np.int64, count=rows),
            "weight_version_last": np.fromiter((s.version_last for s in samples), dtype=np.int64, count=rows),
            "prompt_length": prompt_lengths,
            "response_length": lengths,
            "length": prompt_lengths + lengths,
        }
    )
