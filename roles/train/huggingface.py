"""The train role on transformers: one instance is one of the ranks that share the weights."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, ClassVar

from roles.train.config import HuggingFaceTrainConfig
from roles.train.role import ShardedTrain

if TYPE_CHECKING:
    from roles.train.huggingface_model import HFPolicy
    from roles.train.huggingface_weights import HFExport
    from roles.train.offload import Offload
    from roles.train.trainer import Trainer

_log = logging.getLogger(__name__)


class HuggingFaceTrain(ShardedTrain):
    """Trains any causal model of transformers whose logits are a projection of its last hidden states.

    Weights, gradients and optimizer state are cut over all ranks (FSDP2), and each computes a part of the rows.
    """

    Config: ClassVar[type[HuggingFaceTrainConfig]] = HuggingFaceTrainConfig
    config: HuggingFaceTrainConfig

    def setup(self) -> None:
        """Load the model; raises ConfigError where config, model and installation do not fit."""
        started = time.perf_counter()
        self._configure_process()
        from roles.train import huggingface_checkpoint as checkpoint
        from roles.train import huggingface_lora, offload, trainer
        from roles.train import huggingface_model as model
        from roles.train import huggingface_passes as passes
        from roles.train import huggingface_weights as weights

        self._policy: HFPolicy = model.build_policy(self.config, self.context)
        learner = passes.HFLearner(self.config, self._policy)
        self._trainer: Trainer = trainer.Trainer(self.config, learner)
        self._export: HFExport = weights.HFExport(self._policy)
        if self._policy.adapter is not None:
            self._adapters = huggingface_lora.HFAdapters(self._policy)
        self._offload: Offload = offload.Offload(self._policy, moves=self.context.device == "cuda", held=model.held)
        self._checkpoint = checkpoint.HFCheckpoint(self._policy, self._trainer)
        _log.info("rank %d ready in %.1f s", self.context.rank, time.perf_counter() - started)

    def _leave(self) -> None:
        from roles.train.process_group import leave

        leave()

    def _write_folder(self, path: str) -> None:
        from roles.train.hf_folder import write_folder

        policy = self._policy
        write_folder(self._export, path, source=policy.source, hf_config=policy.settings, dtype=policy.dtype)
