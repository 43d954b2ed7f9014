"""Lets megatron-core and mbridge run on a machine without CUDA.

Both name CUDA in their code: `torch.cuda.current_device()`, `device="cuda"`, streams, `"torch.cuda.FloatTensor"`. torch
itself stays as it is, since other libraries look at it. Instead the module-global name `torch` inside `megatron.core.*`
and `mbridge.*` is bound to a proxy that answers those questions for the CPU. With CUDA nothing here does anything.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

_CPU = torch.device("cpu")
_PREFIXES = ("megatron.core", "mbridge")
_FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange", "zeros_like", "empty_like", "ones_like")


def needed() -> bool:
    """Whether Megatron must be told that it runs on a CPU."""
    return not torch.cuda.is_available()


@contextlib.contextmanager
def quick_import() -> Iterator[None]:
    """Import Megatron and mbridge in here: without CUDA, what they load and this role never asks for stays away.

    Functions marked for `torch.compile` stay plain ones: compiling them would load the compiler at import (over a
    second) and run a C++ one at the first call. Megatron's inference engine finds no wandb, to which it would report.
    mbridge's list of all its models is not read: those for images load half of transformers. `bridge.py` names its own.
    """
    if not needed():
        yield
        return
    compile_ = torch.compile
    torch.compile = _plain  # type: ignore[assignment]
    hidden = "wandb" not in sys.modules
    if hidden:
        sys.modules["wandb"] = None  # type: ignore[assignment]
    _bare_package("mbridge.models")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.compile = compile_
        if hidden:
            sys.modules.pop("wandb", None)


def _bare_package(name: str) -> None:
    """Let modules of a package be imported without running its `__init__`; one that is imported already stays."""
    parent, _, own = name.partition(".")
    if name in sys.modules or (found := importlib.util.find_spec(parent)) is None:
        return
    package = types.ModuleType(name)
    package.__path__ = [os.path.join(folder, own) for folder in found.submodule_search_locations or ()]
    sys.modules[name] = package


def _plain(model: Any = None, **_: Any) -> Any:
    return model if model is not None else (lambda function: function)


def install() -> None:
    """Bind the proxy in every Megatron and mbridge module imported so far; call again after later imports."""
    if not needed():
        return
    first = not _installed()
    for name, module in list(sys.modules.items()):
        if name.startswith(_PREFIXES) and getattr(module, "torch", None) is torch:
            module.torch = _PROXY  # type: ignore[attr-defined]
    if first:
        _patch_optimizers()
        _patch_random_states()
        _patch_experts()
        _patch_weight_gradient()
        _patch_fusions()
        _patch_lone_collectives()


def _installed() -> bool:
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    return parallel_state is not None and getattr(parallel_state, "torch", None) is _PROXY


class _Stream:
    device = _CPU

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def synchronize(self) -> None: ...
    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self, event: Any = None) -> _Event:
        return _Event()


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


class _Cuda(types.ModuleType):
    """`torch.cuda` as seen from Megatron: the current device is the CPU, and streams are nothing."""

    Stream, Event = _Stream, _Event

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_device(self) -> torch.device:
        return _CPU

    def synchronize(self, *_: Any, **__: Any) -> None: ...

    def empty_cache(self) -> None: ...

    def current_stream(self, *_: Any) -> _Stream:
        return _Stream()

    default_stream = current_stream

    def stream(self, stream: Any = None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def get_rng_state(self, *_: Any, **__: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)


class _Torch(types.ModuleType):
    """`torch` as seen from Megatron: factories asked for a CUDA tensor make a CPU one."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _Cuda("torch.cuda")
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


_PROXY = _Torch()


@contextlib.contextmanager
def _cuda_type_names() -> Iterator[None]:
    """Inside, `tensor.type()` says `torch.cuda.*`, which is what Megatron's optimizers ask before they accept one."""
    type_, cuda = torch.Tensor.type, torch.Tensor.cuda

    def cuda_type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return type_(self).replace("torch.", "torch.cuda.", 1)  # type: ignore[union-attr]
        return type_(self, dtype, *args, **kwargs)

    torch.Tensor.type = cuda_type  # type: ignore[assignment, method-assign]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.Tensor.type, torch.Tensor.cuda = type_, cuda  # type: ignore[method-assign]


def _with_cuda_type_names(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _cuda_type_names():
            return function(*args, **kwargs)

    return call


def _patch_optimizers() -> None:
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.optimizer import distrib_optimizer, optimizer

    for owner, name in (
        (optimizer.Float16OptimizerWithFloat16Params, "__init__"),
        (distrib_optimizer.DistributedOptimizer, "__init__"),
        (LanguageModule, "setup_embeddings_and_output_layer"),
    ):
        setattr(owner, name, _with_cuda_type_names(getattr(owner, name)))


def _patch_random_states() -> None:
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _patch_experts() -> None:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def as_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        """The sizes given to all_to_all must be plain numbers; the original leaves CPU tensors as they are."""
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    for module in (moe_utils, token_dispatcher):
        if hasattr(module, "maybe_move_tensor_to_cpu"):
            module.maybe_move_tensor_to_cpu = as_host
    if not hasattr(moe_utils, "te_general_gemm"):
        # 0.16.1 reads this name unconditionally, and defines it with Transformer Engine only.
        moe_utils.te_general_gemm = None


class _WeightGradient:
    """The fused CUDA extension's two functions: a weight gradient added to the gradient buffer by the matmul itself.

    It saves one pass over a fresh gradient a weight and micro-batch.
    """

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
        if inputs.dtype == main_grad.dtype:
            main_grad.addmm_(grad_output.t(), inputs)
        else:
            main_grad.add_(grad_output.t() @ inputs)

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32


def _patch_weight_gradient() -> None:
    from megatron.core.tensor_parallel import layers

    layers.fused_weight_gradient_mlp_cuda = _WeightGradient
    layers._grad_accum_fusion_available = True


def _patch_fusions() -> None:
    """Our functions in place of the CUDA kernels, where Megatron has a fused gated activation and rotary embedding."""
    from megatron.core.transformer import attention, mlp

    from roles.train import fused

    plain = attention.apply_rotary_pos_emb

    def rotary(
        states: torch.Tensor,
        angles: torch.Tensor,
        config: Any,
        cu_seqlens: Any = None,
        mscale: float = 1.0,
        **kwargs: Any,
    ) -> Any:
        if cu_seqlens is None and mscale == 1.0 and not (config.rotary_interleaved or config.multi_latent_attention):
            return fused.rotary(states, angles)
        return plain(states, angles, config, cu_seqlens, mscale, **kwargs)

    def swiglu(gate_up: torch.Tensor, bias: torch.Tensor | None, *_: Any) -> torch.Tensor:
        return fused.swiglu(gate_up if bias is None else gate_up + bias)

    attention.apply_rotary_pos_emb = rotary
    mlp.bias_swiglu_impl = swiglu


def _patch_lone_collectives() -> None:
    """With one data-parallel rank, gradients and weights are where they belong: gloo would copy all of them twice."""
    from megatron.core.distributed import param_and_grad_buffer as buffers

    def unless_alone(collective: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(collective)
        def call(output: torch.Tensor, inputs: torch.Tensor, **kwargs: Any) -> Any:
            if kwargs["group"].size() == 1 and output.data_ptr() == inputs.data_ptr():
                return None
            return collective(output, inputs, **kwargs)

        return call

    buffers.dist_all_gather_func = unless_alone(buffers.dist_all_gather_func)
    buffers.dist_reduce_scatter_func = unless_alone(buffers.dist_reduce_scatter_func)
