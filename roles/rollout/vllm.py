"""Sampling from the policy with vLLM: one engine a replica, tensor parallelism inside it.

vLLM is imported in `setup`, after the environment it reads at import is set.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rolegraph.batch import Batch
from rolegraph.errors import TurnError, WeightSyncError
from rolegraph.interfaces import AdapterInfo, RolloutRole, SamplingParams, TensorInfo, TransferGroup
from rolegraph.role import RoleContext, endpoint
from roles.rollout import arguments
from roles.rollout.adapters import request
from roles.rollout.config import VLLMRolloutConfig
from roles.rollout.drawing import DrawingEngine, generate
from roles.rollout.manifest import check_adapter, check_manifest, incomplete

if TYPE_CHECKING:
    from vllm import LLMEngine


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
        self._sync_s = 0.0
        """The longest that a sync may take."""
        self._engine = DrawingEngine(config, context)

    def setup(self) -> None:
        """Start the engine."""
        self._engine.start()
        if self.config.enable_lora:
            self._raise(self._engine.thread.call(lambda engine: engine.collective_rpc("adapter_start")))
            self._engine.thread.adapter = request()
        self._weights = arguments.weight_shapes(self.config.folder)

    def teardown(self) -> None:
        """Stop the engine and its worker processes."""
        self._engine.close()

    @endpoint(dispatch="queue")
    def generate(self, prompts: Batch, sampling: SamplingParams) -> Batch:
        """See `RolloutRole.generate`; safe to call from many threads at once.

        Raises BatchError, naming the uid, for a prompt that is empty, has ids the model lacks, or leaves no room for
        `sampling.max_tokens` within `max_model_len`; TurnError while the engine is asleep or its weights are dropped.
        """
        self._engine.slumber.refuse_samples()
        return generate(self._engine, prompts, sampling)

    @endpoint(lane="control")
    def abort(self) -> int:
        """See `RolloutRole.abort`; waits for the engine step in progress."""
        return self._engine.thread.abort()

    @endpoint()
    def transfer_workers(self) -> tuple[int, int]:
        """See `RolloutRole.transfer_workers`."""
        return self.context.rank, self.config.tensor_parallel_size

    @endpoint()
    def connect_weights(self, group: TransferGroup) -> None:
        """See `RolloutRole.connect_weights`; raises WeightSyncError when a worker cannot join."""
        self._sync_s = group.timeout_s
        first = group.offsets[self.context.rank]
        self._raise(
            self._engine.thread.call(lambda engine: engine.collective_rpc("stream_connect", args=(group, first)))
        )

    @endpoint()
    def receive_weights(
        self, manifest: list[TensorInfo], bucket_bytes: int, version: int, *, adapter: AdapterInfo | None = None
    ) -> float:
        """See `RolloutRole.receive_weights`.

        Raises WeightSyncError naming the weight that is missing, unknown or misshapen, and TurnError while the weights
        are asleep. If the transfer broke after the first weights had been loaded, samples wait for a later sync, as
        long as one may take, and end with WeightSyncError where none succeeds.
        """
        started = time.monotonic()
        try:
            self._engine.slumber.refuse_weights()
            self._check(manifest, adapter)
        except (TurnError, WeightSyncError):
            VLLMRollout.disconnect_weights(self)  # the trainer is already sending
            raise

        def receive(engine: LLMEngine) -> None:
            answers: list[tuple[str | None, bool]] = (
                engine.collective_rpc("stream_receive", args=(manifest,))
                if adapter is None
                else engine.collective_rpc("adapter_receive", args=(manifest, adapter))
            )
            faults = [fault for fault, _ in answers]
            if any(faults):
                whole = all(whole for _, whole in answers) and all(faults)
                if not whole:
                    torn = next(fault for fault in faults if fault)
                    self._engine.thread.hold(incomplete(torn), self._sync_s)
                self._raise(faults)
            self._engine.slumber.filled()
            # Running samples go on with the new weights, from a cache computed anew.
            if not engine.reset_prefix_cache(reset_running_requests=True):
                raise WeightSyncError("vLLM did not reset its prefix cache")
            self._engine.thread.take_version(version)
            self._engine.thread.date_unstarted()
            self._engine.thread.go_on()

        self._engine.thread.call(receive)
        return time.monotonic() - started

    @endpoint()
    def disconnect_weights(self) -> None:
        """See `RolloutRole.disconnect_weights`."""
        self._engine.thread.call(lambda engine: engine.collective_rpc("stream_disconnect"))

    @endpoint()
    def sleep(self, level: int) -> None:
        """See `RolloutRole.sleep` and `DrawingEngine.sleep`."""
        self._engine.sleep(level)

    @endpoint()
    def wake_up(self, parts: tuple[str, ...]) -> None:
        """See `RolloutRole.wake_up` and `DrawingEngine.wake_up`."""
        self._engine.wake_up(parts)

    def _raise(self, faults: list[str | None]) -> None:
        for worker, fault in enumerate(faults):
            if fault:
                raise WeightSyncError(f"{self.context.role} replica {self.context.rank}, worker {worker}: {fault}")

    def _check(self, manifest: list[TensorInfo], adapter: AdapterInfo | None) -> None:
        """Compare what the trainer announces with what the engine was started for."""
        if (adapter is not None) != self.config.enable_lora:
            what, key = ("all weights", "true") if adapter is None else ("an adapter", "false")
            raise WeightSyncError(f"the trainer sends {what}, and the engine has rollout.enable_lora={key}")
        if self._weights is None:
            return
        if adapter is not None:
            check_adapter(manifest, self._weights, adapter)
            return
        tied = arguments.model_config(self.config.folder).get("tie_word_embeddings")
        check_manifest(manifest, self._weights, optional={"lm_head.weight"} if tied else set())
