"""Sampling from the policy with transformers, for models and machines that vLLM does not serve."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar

from rolegraph.batch import Batch
from rolegraph.errors import TurnError, WeightSyncError
from rolegraph.interfaces import AdapterInfo, RolloutRole, SamplingParams, TensorInfo, TransferGroup
from rolegraph.role import RoleContext, endpoint
from roles.rollout.drawing import generate
from roles.rollout.huggingface_config import HuggingFaceRolloutConfig
from roles.rollout.manifest import check_manifest
from roles.rollout.transformers_engine import TransformersEngine

if TYPE_CHECKING:
    from torch import Tensor

    from rolegraph.wire import WeightReceiver


class HuggingFaceRollout(RolloutRole):
    """A replica. Draws and `rollout_logprobs` follow the rules of `VLLMRollout`, to rounding.

    Samples are drawn a batch at a time; the next batch begins when the longest sample of this one has ended. So a call
    brings many prompts, and those of like length meet.
    """

    Config: ClassVar[type[HuggingFaceRolloutConfig]] = HuggingFaceRolloutConfig
    config: HuggingFaceRolloutConfig
    queue_rows: ClassVar[int] = 32
    queue_rows_alone: ClassVar[int] = 4096
    queue_in_flight: ClassVar[int] = 1

    def __init__(self, config: HuggingFaceRolloutConfig, context: RoleContext) -> None:
        super().__init__(config, context)
        self._engine = TransformersEngine(config, context)
        self._receiver: WeightReceiver | None = None
        self._sync_s = 0.0
        """The longest that a sync may take."""

    def setup(self) -> None:
        """Load the model. Raises ConfigError for one that cannot be drawn from here."""
        self._engine.start(self.config.max_model_len)

    @endpoint(dispatch="queue")
    def generate(self, prompts: Batch, sampling: SamplingParams) -> Batch:
        """See `RolloutRole.generate`; safe to call from many threads at once, one of which computes.

        Raises BatchError, naming the uid, for a prompt that is empty, has ids the model lacks, or leaves no room for
        `sampling.max_tokens` within `max_model_len`; TurnError while the engine is asleep or its weights are dropped.
        """
        self._engine.slumber.refuse_samples()
        return generate(self._engine, prompts, sampling)

    @endpoint(lane="control")
    def abort(self) -> int:
        """See `RolloutRole.abort`; waits for the step in progress."""
        return self._engine.abort()

    @endpoint()
    def transfer_workers(self) -> tuple[int, int]:
        """See `RolloutRole.transfer_workers`."""
        return self.context.rank, 1

    @endpoint()
    def connect_weights(self, group: TransferGroup) -> None:
        """See `RolloutRole.connect_weights`; raises WeightSyncError when it cannot join."""
        from rolegraph.wire import WeightReceiver

        self._leave()
        self._sync_s = group.timeout_s
        self._receiver = WeightReceiver(group, group.offsets[self.context.rank], device=self.context.device)

    @endpoint()
    def receive_weights(
        self, manifest: list[TensorInfo], bucket_bytes: int, version: int, *, adapter: AdapterInfo | None = None
    ) -> float:
        """See `RolloutRole.receive_weights`. Samples on their way go on with the new weights from their next token on.

        Raises WeightSyncError naming the weight that is missing, unknown or misshapen, and TurnError while the weights
        are asleep. If the transfer broke after the first weights had been loaded, samples wait for a later sync, as
        long as one may take, and end with WeightSyncError where none succeeds.
        """
        started = time.monotonic()
        weights = self._engine.weights
        with weights.gate.passed():
            try:
                into = self._targets(manifest, adapter)
            except (TurnError, WeightSyncError):
                self._leave()  # the trainer is already sending
                raise
            is_begun = False
            try:
                for name, tensor in self._joined().receive(manifest):
                    is_begun = True
                    into[name].copy_(tensor)
                self._engine.frozen.wait()
            except Exception as error:
                self._leave()
                if is_begun:
                    weights.torn, weights.awaited_until = str(error), time.monotonic() + self._sync_s
                raise self._fault(error) from error
            weights.torn = None
            weights.version, weights.changes = version, weights.changes + 1
            self._engine.slumber.filled()
        return time.monotonic() - started

    @endpoint()
    def disconnect_weights(self) -> None:
        """See `RolloutRole.disconnect_weights`."""
        self._leave()

    @endpoint()
    def sleep(self, level: int) -> None:
        """See `RolloutRole.sleep` and `TransformersEngine.sleep`."""
        self._engine.sleep(level)

    @endpoint()
    def wake_up(self, parts: tuple[str, ...]) -> None:
        """See `RolloutRole.wake_up` and `TransformersEngine.wake_up`."""
        self._engine.wake_up(parts)

    def _targets(self, manifest: list[TensorInfo], adapter: AdapterInfo | None) -> dict[str, Tensor]:
        """Where each weight goes; raises for weights that are not those of the model, or cannot be written now."""
        from roles.checkpoint_names import UnnamedWeightError, checkpoint_views, need_not_come

        if adapter is not None:
            raise WeightSyncError(f"{self.context.role} was started without room for an adapter")
        self._engine.slumber.refuse_weights()
        try:
            views = checkpoint_views(self._engine.model)
        except UnnamedWeightError as error:
            raise WeightSyncError(f"{self.context.role} cannot take weights for this kind of model: {error}") from error
        shapes = {name: tuple(view.shape) for name, view in views.items()}
        check_manifest(manifest, shapes, optional=need_not_come(self._engine.model, views))
        return views

    def _joined(self) -> WeightReceiver:
        if self._receiver is None:
            raise WeightSyncError("this engine is not connected to a trainer")
        return self._receiver

    def _leave(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()

    def _fault(self, error: Exception) -> WeightSyncError:
        what = str(error) if isinstance(error, WeightSyncError) else f"{type(error).__name__}: {error}"
        return WeightSyncError(f"{self.context.role} replica {self.context.rank}: {what}")
