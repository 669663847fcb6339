"""Lets megatron-core 0.16 run on a CPU: what it asks of CUDA is answered by the host. To be imported before it."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch

_FACTORIES = ("arange", "empty", "full", "ones", "rand", "randint", "randn", "tensor", "zeros")
_TYPES = {torch.float32: "Float", torch.bfloat16: "BFloat16", torch.float16: "Half"}


class _Stream:
    """Stands for any stream: all work is done when it is asked for."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


def _on_host(factory: Any) -> Any:
    def make(*args: Any, **options: Any) -> Any:
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = "cpu"
        return factory(*args, **options)

    return make


def _kind(self: torch.Tensor, dtype: Any = None, *args: Any, **options: Any) -> Any:
    if dtype is None and self.dtype in _TYPES:
        return f"torch.cuda.{_TYPES[self.dtype]}Tensor"
    return _type(self) if dtype is None else _type(self, dtype, *args, **options)


for _name in _FACTORIES:
    setattr(torch, _name, _on_host(getattr(torch, _name)))
_type, torch.Tensor.type = torch.Tensor.type, _kind  # type: ignore[method-assign,assignment]
torch.Tensor.cuda = lambda self, *args, **options: self  # type: ignore[method-assign]
torch.nn.Module.cuda = lambda self, *args, **options: self  # type: ignore[method-assign]
torch.cuda.FloatTensor = lambda values: torch.tensor(values, dtype=torch.float32)  # type: ignore
torch.cuda.IntTensor = lambda values: torch.tensor(values, dtype=torch.int32)  # type: ignore
torch.cuda.current_device = lambda: "cpu"  # type: ignore
torch.cuda.device_count = lambda: 0
torch.cuda.synchronize = lambda *args: None
torch.cuda.empty_cache = lambda: None
torch.cuda._lazy_init = lambda: None
torch.cuda.Stream = _Stream  # type: ignore
torch.cuda.Event = _Stream  # type: ignore
torch.cuda.default_stream = torch.cuda.current_stream = lambda *args: _Stream()  # type: ignore
torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore
torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda *args, **options: torch.get_rng_state()
torch.cuda.set_rng_state = torch.cuda.random.set_rng_state = lambda state, *args: torch.set_rng_state(state)
torch.cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)  # type: ignore

import megatron.core.tensor_parallel.random as _random  # noqa: E402

_random._set_cuda_rng_state = lambda state, *args, **options: torch.set_rng_state(state)
_random._get_cuda_rng_state = lambda *args, **options: torch.get_rng_state()
logging.getLogger(_random.__name__).setLevel(logging.ERROR)  # that drawing changes the host's generator is the point

import megatron.core.transformer.moe.moe_utils as _experts  # noqa: E402

if not hasattr(_experts, "te_general_gemm"):  # 0.16.1 asks for it without Transformer Engine, too
    _experts.te_general_gemm = None

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer as _Distributed  # noqa: E402

_set = _Distributed._set_main_param_and_optimizer_states


def _set_but_step(self: Any, parameter: Any, tensors: Any) -> None:
    """Sets what was loaded. 0.16.1 leaves the step to groups when it saves, and asks torch's optimizers for it here."""
    group, order = self.model_param_group_index_map[parameter]
    kept = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
    _set(self, parameter, {"step": kept["step"], **tensors})


_Distributed._set_main_param_and_optimizer_states = _set_but_step
