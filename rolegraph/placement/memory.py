"""How much memory a device needs in each phase of a step: an estimate, from sizes alone.

Everything is in bytes a device. `w` is the width of the compute type (2 for bfloat16, 4 for float32); t, p, c, e, d are
the tensor-, pipeline-, context-, expert- and data-parallel sizes, s is t with sequence parallelism and 1 without.

A trainer's rank holds, with P parameters of its stage (layers / p, matrices / t, experts / e; the embedding, its
vocabulary padded to a multiple of t, on the first stage; the head, or a copy of the tied embedding, on the last):

    weights      w P
    gradients    4 P                              float32
    optimizer    (8 + (4 if w = 2)) P / shards    two moments, and float32 weights beside bfloat16 ones; shards = d c
                                                  (t c d / e for experts) with a distributed optimizer, else 1
    reference    w P                              where reference weights are kept
    average      4 P                              where a moving average of the weights teaches
    activations  w T (L A + 2 A + 2 h / s) + min(budget, 4 T V / t)

Where adapters are trained (LoRA), P of the gradients, the optimizer and the average are their parameters alone, the
weights hold them as well, and the reference is the model without them: r (in + out / t) for a module of rank r, whose
cut side is the one that ranks share of its matrix.

T is the tokens of a micro-batch / c; L the layers of the stage times the micro-batches it has in flight (p - stage in
the 1F1B schedule, no more than there are); A the elements that a layer keeps of a token for the backward pass:

    A = 4 h / s + (2 q + 2 k + n) / t + 3 f / t

for hidden size h, query width q, key width k (and as much for values), n = q + k where queries and keys are normed, and
MLP width f; with experts the last term is m (h + 3 f) for m experts a token. Inputs and outputs of both norms; query,
key, value and the attention's output (its matrix of scores is never kept); both halves of the gated MLP and what goes
into its last matrix. It is the counting of Korthikanti et al. 2022 (arXiv 2205.05198) for this kind of layer. 2 A are
the layer whose gradient is being computed. The last stage keeps at most `budget` bytes of softmax, the rest comes anew.
With full recomputation A shrinks to h / s for all but one layer. A forward pass alone keeps nothing: 2 A for L A.

Where ranks share all state (FSDP2, train=huggingface), each of d holds 4 P / d of weights, whatever w is (but those
beside adapters are in w, and none of experts is adapted), of the reference and of the average, 8 P / d of moments, and
4 P of gradients, P being all parameters: / d where a step has one micro-batch, or each is reduced at once. While it
computes it also has, in w, two gathered layers and what is outside of the layers; a layer of transformers keeps
4 h + n + 2 q + 2 k + f more than A, as its operators are not fused.

An engine's rank holds its weights (matrices and experts / t), a KV cache of 2 w layers max(k / t, one head) a token,
and room for a step's widest layer and for the logits of all samples, w B (4 h + (2 q + 2 k + 3 f) / t) + 8 N V, for B
tokens a step and N samples. The cache takes what the engine's share of the device leaves; where that is not known, the
estimate is N sequences of full length.

The rank of a teacher or a reward model holds w P, as a trainer's (one that transformers runs: all parameters / p), and
the activations of a forward pass.

Left out: CUDA's contexts (about half a GiB a process), buffers of collectives, the gaps of allocators. `USABLE` of a
device is kept for the roles, the rest for those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rolegraph.models.architecture import Architecture

USABLE = 0.9
"""Of a GPU's memory, all that roles take together."""
HEAD_BUDGET = 512 * 2**20
"""Bytes of softmax that the trainer's last stage keeps between forward and backward."""
FULL_PRECISION = 4
Parts = Mapping[str, int]
"""Bytes of each part of a role's memory: weights, gradients, optimizer, reference, average, kv_cache, activations,
workspace."""


@dataclass(frozen=True)
class Trainer:
    """What the memory of a trainer's rank depends on."""

    model: Architecture
    width: int
    """Bytes of a weight and of an activation."""
    tokens: int
    """Of a micro-batch."""
    micro_batches: int = 1
    """A rank's micro-batches of a step."""
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    data: int = 1
    vocabulary_multiple: int = 1
    """The padded vocabulary divides by it."""
    sequence_parallel: bool = False
    distributed_optimizer: bool = True
    reference: bool = False
    average: bool = False
    recompute: bool = False
    adapter_rank: int = 0
    """Of low-rank adapters, which are then all that is trained; 0: every weight is."""
    adapter_targets: tuple[str, ...] = ()
    """The modules that have one, by the last part of their Hugging Face names."""

    def adapter_parameters(self) -> int:
        """Parameters of the adapters on a rank, of any stage."""
        model, layers = self.model, self.model.num_hidden_layers // self.pipeline
        hidden, inner = model.hidden_size, model.intermediate_size
        widths = {
            "q_proj": model.query_size,
            "k_proj": model.kv_size,
            "v_proj": model.kv_size,
            "o_proj": model.query_size,
        }
        targets: tuple[str, ...] = (*widths, *(() if model.num_experts else ("gate_proj", "up_proj", "down_proj")))
        if "all-linear" not in self.adapter_targets:
            targets = self.adapter_targets
        # Each has one side of the hidden size, which every rank has, and another that they share.
        other = sum(widths.get(name, inner) for name in targets)
        return layers * self.adapter_rank * (hidden * len(targets) + other // self.tensor)

    def parameters(self, stage: int) -> tuple[int, int]:
        """Parameters on a rank of a pipeline stage: all but experts, and experts."""
        model = self.model
        layers = model.num_hidden_layers // self.pipeline
        dense, experts = layers * model.layer_dense_parameters(self.tensor), 0
        if model.num_experts:
            experts = layers * model.layer_expert_parameters(self.expert)
        embedding = self.padded_vocabulary // self.tensor * model.hidden_size
        last = self.pipeline - 1
        if stage == 0:
            dense += embedding
        if stage == last:
            dense += model.hidden_size
            # A tied head is the embedding where both are on one stage, and a copy where not.
            dense += embedding if last or not model.tie_word_embeddings else 0
        return dense, experts

    @property
    def padded_vocabulary(self) -> int:
        """Rows of the embedding over all tensor-parallel ranks."""
        multiple = self.vocabulary_multiple
        return -(-self.model.vocab_size // multiple) * multiple

    def state(self, stage: int) -> dict[str, int]:
        """What a rank of the stage holds between two steps."""
        dense, experts = self.parameters(stage)
        each = 8 + (0 if self.width == FULL_PRECISION else 4)
        shards = self.data * self.context if self.distributed_optimizer else 1
        expert_shards = max(self.tensor * self.context * self.data // self.expert, 1) if shards > 1 else 1
        weights = dense + experts
        if self.adapter_rank:
            dense, experts = self.adapter_parameters(), 0
            weights += dense
        trained = dense + experts
        found = {
            "weights": self.width * weights,
            "gradients": 4 * trained,
            "optimizer": each * dense // shards + each * experts // expert_shards,
        }
        if self.reference and not self.adapter_rank:
            found["reference"] = self.width * trained
        if self.average:
            found["average"] = 4 * trained
        return found

    def layer(self) -> float:
        """Elements that a layer keeps of a token for its backward pass."""
        model, tensor = self.model, self.tensor
        query, key = model.query_size, model.kv_size
        attention = 2 * query + 2 * key + (query + key if model.qk_norm else 0)
        inner = 3 * model.intermediate_size
        mlp = model.num_experts_per_tok * (model.hidden_size + inner) if model.num_experts else inner / tensor
        return 4 * self._hidden() + attention / tensor + mlp

    def _hidden(self) -> float:
        return self.model.hidden_size / (self.tensor if self.sequence_parallel else 1)

    def activations(self, stage: int, *, backward: bool = True) -> int:
        """Bytes of a rank's activations at their peak, with a backward pass to come or without."""
        tokens, each = self.tokens / self.context, self.layer()
        last = self.pipeline - 1
        kept = 0.0
        if backward:
            in_flight = min(self.pipeline - stage, max(self.micro_batches, 1))
            layers = self.model.num_hidden_layers // self.pipeline * in_flight
            kept = layers * (self._hidden() if self.recompute else each)
        total = self.width * tokens * (kept + 2 * each + 2 * self._hidden())
        if stage == last:
            total += min(HEAD_BUDGET, 4 * tokens * self.padded_vocabulary / self.tensor)
        return round(total)

    def largest_stage(self) -> int:
        """The pipeline stage whose ranks need the most memory in a training step."""
        return max(range(self.pipeline), key=lambda stage: sum(self.state(stage).values()) + self.activations(stage))


@dataclass(frozen=True)
class Sharded(Trainer):
    """A trainer whose ranks, `data` of them, share all state (FSDP2)."""

    reduces_each: bool = False
    """Gradients are reduced after each micro-batch."""

    def state(self, stage: int) -> dict[str, int]:
        """What a rank holds between two steps."""
        ranks, count = self.data, self.adapter_parameters() or self.model.parameters
        frozen = self.width if self.adapter_rank else FULL_PRECISION
        whole = frozen * self.model.parameters + FULL_PRECISION * self.adapter_parameters()
        found = {
            "weights": whole // ranks,
            "gradients": 4 * count // (ranks if self.reduces_each or self.micro_batches <= 1 else 1),
            "optimizer": 8 * count // ranks,
        }
        if self.reference and not self.adapter_rank:
            found["reference"] = 4 * count // ranks
        if self.average:
            found["average"] = 4 * count // ranks
        return found

    def layer(self) -> float:
        """Elements that a layer keeps of a token for its backward pass."""
        model = self.model
        inner = model.intermediate_size * max(model.num_experts_per_tok, 1)
        normed = model.query_size + model.kv_size if model.qk_norm else 0
        return super().layer() + 4 * model.hidden_size + normed + 2 * (model.query_size + model.kv_size) + inner

    def activations(self, stage: int, *, backward: bool = True) -> int:
        """Bytes of a rank's activations at their peak, and of the weights that are gathered then."""
        layers = self.model.num_hidden_layers
        outside = self.model.parameters - layers * self.model.layer_parameters()
        gathered = outside + min(2, layers) * self.model.layer_parameters()
        return super().activations(stage, backward=backward) + self.width * gathered


@dataclass(frozen=True)
class Engine:
    """What the memory of one device of an engine depends on."""

    model: Architecture
    width: int
    max_len: int
    """Tokens of a sequence."""
    max_seqs: int
    """Sequences that are advanced at once."""
    batch_tokens: int
    """Most tokens of one engine step."""
    tensor: int = 1
    share_bytes: int | None = None
    """Memory of the device that the engine fills; null where it is not known."""
    cache_bytes: int | None = None
    """Size of the KV cache where it is given."""
    fills: bool = True
    """Whether it takes its whole share, or for a cache no more than all its sequences need."""
    split_by: str = "tensor_parallel_size"
    """The key that spreads the model over `tensor` devices."""

    def weights(self) -> int:
        """Bytes of the weights on one device."""
        model = self.model
        vocabulary = -(-model.vocab_size // (64 * self.tensor)) * 64
        layer = model.layer_dense_parameters(self.tensor) + model.layer_expert_parameters() // self.tensor
        outside = vocabulary * model.hidden_size * (1 if model.tie_word_embeddings else 2) + model.hidden_size
        return self.width * (outside + model.num_hidden_layers * layer)

    def sequence(self) -> int:
        """Bytes of the KV cache of one sequence of full length, on one device."""
        heads = max(self.model.num_key_value_heads // self.tensor, 1)
        return 2 * self.width * self.model.num_hidden_layers * heads * self.model.head_dim * self.max_len

    def workspace(self) -> int:
        """Bytes of the widest layer of a step, and of the logits of all samples."""
        model = self.model
        inner = model.intermediate_size * (model.num_experts_per_tok if model.num_experts else 1)
        layer = 4 * model.hidden_size + (2 * model.query_size + 2 * model.kv_size + 3 * inner) / self.tensor
        return round(self.width * self.batch_tokens * layer + 8 * self.max_seqs * model.vocab_size)

    def parts(self) -> dict[str, int]:
        """All of it; the cache takes what the share leaves, at least 0."""
        found = {"weights": self.weights(), "workspace": self.workspace()}
        cache = self.cache_bytes
        if cache is None:
            full = self.max_seqs * self.sequence()
            left = full if self.share_bytes is None else max(self.share_bytes - sum(found.values()), 0)
            cache = left if self.fills else min(left, full)
        return {**found, "kv_cache": cache}


@dataclass(frozen=True)
class Copy:
    """A model that only computes forward, as teachers and reward models do, on one of the ranks that share it."""

    model: Architecture
    width: int
    tokens: int
    """In one forward pass."""
    pipeline: int = 1
    """Devices that the layers are spread over."""
    tensor: int = 1
    context: int = 1
    expert: int = 1
    sequence_parallel: bool = False

    def parts(self) -> dict[str, int]:
        """Weights, and what one layer and the states around it take."""
        ranks = Trainer(
            self.model,
            self.width,
            self.tokens,
            tensor=self.tensor,
            pipeline=self.pipeline,
            context=self.context,
            expert=self.expert,
            vocabulary_multiple=self.tensor,
            sequence_parallel=self.sequence_parallel,
        )
        count = self.model.parameters // self.pipeline
        if self.tensor * self.context * self.expert > 1:
            count = max(sum(ranks.parameters(stage)) for stage in range(self.pipeline))
        return {
            "weights": self.width * count,
            "activations": ranks.activations(self.pipeline - 1, backward=False),
        }


Holder = Trainer | Engine | Copy
