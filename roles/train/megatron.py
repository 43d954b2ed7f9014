"""The train role on megatron-core: one instance is one rank of the mesh."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, ClassVar

from roles.train.config import MegatronTrainConfig
from roles.train.role import ShardedTrain

if TYPE_CHECKING:
    from roles.train.model import Policy
    from roles.train.offload import Offload
    from roles.train.trainer import Trainer
    from roles.train.weights_out import WeightExport

_log = logging.getLogger(__name__)


class MegatronTrain(ShardedTrain):
    """Trains a Hugging Face checkpoint with tensor, pipeline, data, sequence and expert parallelism.

    With CUDA it needs NCCL; without, gloo and the shim of `roles.train.shim`.
    """

    Config: ClassVar[type[MegatronTrainConfig]] = MegatronTrainConfig
    config: MegatronTrainConfig

    def setup(self) -> None:
        """Load the model; raises ConfigError where config, model and installation do not fit."""
        started = time.perf_counter()
        self._configure_process()
        from roles.train import model  # alone at first: it imports Megatron without what is slow and loud

        self._policy: Policy = model.build_policy(self.config, self.context)
        from roles.train import adapters_out, checkpoint, megatron_passes, offload, trainer, weights_out

        self._trainer: Trainer = trainer.Trainer(
            self.config, megatron_passes.MegatronLearner(self.config, self._policy)
        )
        self._export: WeightExport = weights_out.WeightExport(self._policy)
        if self._policy.adapters is not None:
            self._adapters = adapters_out.AdapterMatrices(self._policy, self._policy.adapters)
        self._offload: Offload = offload.Offload(self._policy, moves=self.context.device == "cuda")
        self._checkpoint = checkpoint.Checkpoint(self._policy, self._trainer)
        _log.info("rank %d ready in %.1f s", self.context.rank, time.perf_counter() - started)

    def _leave(self) -> None:
        from roles.train.model import leave

        leave()

    def _write_folder(self, path: str) -> None:
        from roles.train.hf_folder import write_folder

        policy = self._policy
        write_folder(self._export, path, source=policy.source, hf_config=policy.bridge.hf_config, dtype=policy.dtype)
