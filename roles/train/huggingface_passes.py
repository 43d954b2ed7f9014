"""Passes of a sharded model of transformers, and the step of its optimizer."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rolegraph.errors import ConfigError
from rolegraph.interfaces import PolicyWeights
from rolegraph.losses.heads import Head
from roles.logits import mismatch, probe
from roles.train import process_group
from roles.train.config import HuggingFaceTrainConfig
from roles.train.huggingface_model import HFPolicy, local, takes_cache
from roles.train.packing import MicroBatch
from roles.train.passes import Finish, Layout, Learner
from roles.train.scoring import head_logits

_log = logging.getLogger(__name__)


class HFLearner(Learner):
    """A policy whose ranks each take a part of the rows, and each the whole vocabulary.

    Padded rows are given no mask: causal attention looks at nothing to the right, where the padding is. Packed rows are
    told apart by positions that start over, as transformers' masks and flash-attention do it.
    """

    def __init__(self, config: HuggingFaceTrainConfig, policy: HFPolicy) -> None:
        self._policy = policy
        self.device, self.dtype = policy.device, policy.dtype
        self.vocab_size = len(policy.model.get_output_embeddings().weight)
        self.data_group = process_group.everyone()
        self._checkpointing, self._reduces_each = config.gradient_checkpointing, config.reduce_each_micro_batch
        self.layout = Layout(padding_free=policy.packed, token_bytes=_token_bytes(policy, self._checkpointing))
        self._settings = {"use_cache": False} if takes_cache(policy.model) else {}
        # transformers recomputes what says that it trains: that alone says so, as other modules are noisy then (a
        # router that jitters).
        self._recomputed = [each for each in policy.root.modules() if getattr(each, "gradient_checkpointing", False)]
        policy.root.eval()
        self._check(asked_to_pack=bool(config.padding_free))

    def run(self, micro_batches: Iterator[MicroBatch], count: int, finish: Finish, *, train: bool) -> list[Any]:
        """See `Passes.run`."""
        root, results = self._policy.root, []
        for module in self._recomputed:
            module.training = train
        if train:
            self._policy.optimizer.zero_grad()
        try:
            for index, micro in enumerate(micro_batches):
                if train:
                    last = index == count - 1
                    root.set_requires_gradient_sync(last or self._reduces_each)  # type: ignore[operator]
                    root.set_is_last_backward(last)  # type: ignore[operator]
                with torch.set_grad_enabled(train):
                    loss, result = root(self._inputs(micro), partial(finish, micro))
                    if train:
                        loss.backward()
                results.append(result)
        finally:
            self._policy.reshard()
        return results

    def predicting(self, micro: MicroBatch, hidden: Tensor) -> Tensor:
        """See `Passes.predicting`; `hidden` is [batch, seq, h] of all positions."""
        return hidden.reshape(-1, hidden.shape[-1]).index_select(0, micro.predict)

    def head(self) -> Head:
        """See `Passes.head`; whole inside a pass."""
        head, rule = self._policy.model.get_output_embeddings(), self._policy.rule
        return Head(head.weight, getattr(head, "bias", None), rule.scale, rule.soft_cap)

    def head_of(self, weights: PolicyWeights) -> Head:
        """See `Learner.head_of`."""
        rule = self._policy.rule
        return Head(*self._policy.head_of(weights), rule.scale, rule.soft_cap)

    @torch.no_grad()
    def gradient_norm(self) -> float:
        """See `Learner.gradient_norm`."""
        grads = self._gradients()
        norms = torch._foreach_norm(grads) if grads else [torch.zeros((), device=self.device)]
        total = torch.stack([norm.double() for norm in norms]).square().sum()
        dist.all_reduce(total, group=self.data_group)
        return math.sqrt(float(total))

    @torch.no_grad()
    def scale_gradients(self, factor: float) -> None:
        """See `Learner.scale_gradients`."""
        torch._foreach_mul_(self._gradients(), factor)

    def apply(self, rate: float) -> None:
        """See `Learner.apply`."""
        for group in self._policy.optimizer.param_groups:
            group["lr"] = rate
        self._policy.optimizer.step()
        self._policy.optimizer.zero_grad()

    def reset(self) -> None:
        """See `Learner.reset`."""
        self._policy.optimizer.state.clear()

    def _gradients(self) -> list[Tensor]:
        """This rank's part of each gradient."""
        return [local(param.grad) for param in self._policy.root.parameters() if param.grad is not None]

    def _inputs(self, micro: MicroBatch) -> dict[str, Any]:
        packed = {"position_ids": micro.position_ids} if self.layout.padding_free else {}
        return {"input_ids": micro.input_ids, **packed, **self._settings}

    @torch.no_grad()
    def _check(self, *, asked_to_pack: bool) -> None:
        """Compare with the model's own logits, and packed rows with each other, which are padded if these differ.

        Raises ConfigError for a model whose logits are more than we know of, or that was asked to pack and cannot.
        """
        model, ids = self._policy.model, probe(self.vocab_size).to(self.device)

        def compare(hidden: Tensor) -> float | None:
            return mismatch(model(input_ids=ids, **self._settings).logits[0], head_logits(self.head(), hidden[0]))

        def both(hidden: Tensor) -> float | None:
            return mismatch(hidden[0, : ids.shape[1]], hidden[0, ids.shape[1] :])

        name = type(model).__name__
        found = self._policy.root({"input_ids": ids, **self._settings}, compare)
        if found is not None:
            raise ConfigError(
                f"train=huggingface: the logits of {name} are not a projection of its last hidden states (they differ "
                f"by {found:.3g}), and nothing here knows what else it does to them: choose another model"
            )
        if self.layout.padding_free:
            positions = torch.arange(ids.shape[1], device=self.device).repeat(2)[None]
            twice = {"input_ids": ids.repeat(1, 2), "position_ids": positions, **self._settings}
            if (found := self._policy.root(twice, both)) is not None:
                why = f"{name} does not tell packed rows apart (the states of two equal ones differ by {found:.3g})"
                if asked_to_pack:
                    raise ConfigError(f"train.padding_free=true: {why}: set it to false")
                _log.info("rows are padded: %s", why)
                self.layout = replace(self.layout, padding_free=False)
        self._policy.reshard()


def _token_bytes(policy: HFPolicy, checkpointing: bool) -> int:
    """What a token keeps on a rank until the backward, roughly: the tensors that a layer's matrices and norms read."""
    settings = policy.model.config.get_text_config()
    hidden = int(settings.hidden_size)
    inner = int(getattr(settings, "intermediate_size", None) or getattr(settings, "ffn_dim", None) or 4 * hidden)
    layer = hidden if checkpointing else 14 * hidden + 4 * inner
    return max(1, layer * int(settings.num_hidden_layers) * policy.dtype.itemsize)
