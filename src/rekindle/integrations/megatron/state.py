"""Makes a training with Megatron-core's distributed optimizer an entry of a state, which is saved at every step.

Written for megatron-core 0.16. Saved are the main parameters in full precision and the optimizer's moments, as they lie
in this rank's shards. The model's weights follow from them: they are neither saved nor waited for, so that it makes no
difference if their all-gather is still to come, as with ``overlap_param_gather``.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rekindle.errors import UsageError
from rekindle.integrations.megatron.places import Place, agree, place, unplaced, with_ranks
from rekindle.integrations.megatron.surroundings import load_surroundings, surroundings
from rekindle.integrations.versions import warn_if_untested
from rekindle.state.parts import FlatPart
from rekindle.state.placed import PlacedState

__all__ = ["MegatronState"]

_TESTED = ("0.16", "0.16")
"""First and last series of megatron-core that the tests have run with."""

_optimizer: Any = importlib.import_module("megatron.core.optimizer")
_fp8: Any = importlib.import_module("megatron.core.fp8_utils")

_MAIN, _MODEL, _VALUES = "main", "model", "megatron"
"""Begin of the names of main parameters, and of tensors that no optimizer trains; name of all values."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


class MegatronState(PlacedState):
    """Holds model, optimizer, schedule, random states and counters of one rank of Megatron.

    ::

        state = MegatronState(model, optimizer, opt_param_scheduler, args)
        ckpt = rekindle.Checkpointer("runs/17", state={"megatron": state})

    Any layout of tensor, pipeline, expert and data parallelism restores what any other has saved. To be made on all
    ranks, before the Checkpointer: the ranks tell each other which shards they keep.

    Args:
        model: the list of model chunks in Megatron's DistributedDataParallel, or one of them.
        optimizer: what ``get_megatron_optimizer`` returns for a configuration with ``use_distributed_optimizer``.
        opt_param_scheduler: Megatron's ``OptimizerParamScheduler``, if there is one.
        args: an object that counts in attributes: ``consumed_train_samples`` and the like, as Megatron-LM's arguments.

    Raises:
        UsageError: the optimizer is not distributed, leaves its main parameters to others, or trains weights in fp8.
    """

    def __init__(self, model: Any, optimizer: Any, opt_param_scheduler: Any = None, args: Any = None) -> None:
        warn_if_untested("megatron-core", *_TESTED)
        self._chunks = list(model) if isinstance(model, (list, tuple)) else [model]
        self._schedule, self._args = opt_param_scheduler, args
        self._distributed: list[Any] = []
        self._trained: dict[int, list[Place]] = {}
        """Places of this rank's shard of each parameter, by its id."""
        self._rest: list[tuple[dict[str, Any], str, list[Place]]] = []
        self._parts: dict[str, FlatPart] = {}
        self._seen: list[tuple[int, int]] = []
        """Identities and addresses of the tensors that the parts lie in."""
        problem = ""
        try:
            self._find(optimizer)
        except UsageError as error:  # raised on all ranks alike, lest the others wait for this one
            problem = str(error)
        every = [*self._trained.values(), *(places for _, _, places in self._rest)]
        holders = agree([one for places in every for one in places], problem)
        self._trained = {key: with_ranks(places, holders) for key, places in self._trained.items()}
        self._rest = [(kept, name, with_ranks(places, holders)) for kept, name, places in self._rest]

    def _find(self, optimizer: Any) -> None:
        """Finds this rank's shards, and what else the model has."""
        self._distributed = _distributed(optimizer)
        for one in self._distributed:
            _make_state(one.optimizer)
        models = [chunk.module for chunk in self._chunks]
        self._trained = place(models, self._shards())
        trained = {id(p) for one in self._distributed for buffer in one.buffers for p in buffer.params}
        self._rest = unplaced(models, trained)

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Torch's optimizers, which update the shards: one for dense parameters, one for those of experts."""
        return [one.optimizer for one in self._distributed]

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's shards by the names of the whole tensors, and all values."""
        lying = list(self._lying())
        seen = [(id(tensor), tensor.data_ptr()) for _, _, tensor in lying]
        if seen != self._seen:
            self._parts = {f"{kind}.{one.key}": one.of(tensor) for kind, one, tensor in lying}
            self._seen = seen
        return {**self._parts, _VALUES: surroundings(self._distributed, self._schedule, self._args)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the values, and derives the model's weights from the main parameters. A collective."""
        load_surroundings(state[_VALUES], self._distributed, self._schedule, self._args)
        with torch.no_grad():
            for one in self._distributed:
                one._copy_main_params_to_model_params()
        for chunk in self._chunks:
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                if group.param_gather_handle is not None:  # of weights that are no longer wanted
                    group.param_gather_handle.wait()
                    group.param_gather_handle = None
            chunk.start_param_sync(force_sync=True)

    def _shards(self) -> dict[int, tuple[torch.Tensor, int, int]]:
        """Maps the id of each parameter that this rank updates a part of to it, and to first and last of the part."""
        found = {}
        for one in self._distributed:
            for parameter in one.model_param_gbuf_map:
                span = one._get_model_param_range_map(parameter)["param"]
                found[id(parameter)] = parameter, span.start, span.end
        return found

    def _lying(self) -> Iterator[tuple[str, Place, torch.Tensor]]:
        """Yields kind, place and flat tensor of everything that is saved, as it lies now."""
        for one in self._distributed:
            for parameter in one.model_param_gbuf_map:
                kept = one._get_main_param_and_optimizer_states(parameter)
                for at in self._trained[id(parameter)]:
                    yield _MAIN, at, kept["param"]
                    for moment in _MOMENTS:
                        yield moment, at, kept[moment]
        for tensors, name, places in self._rest:
            for at in places:
                yield _MODEL, at, tensors[name]


def _distributed(optimizer: Any) -> list[Any]:
    """Returns the distributed optimizers in what Megatron makes. Raises UsageError for one of another kind."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    found = [one for one in chained if not getattr(one, "is_stub_optimizer", False)]
    for one in found:
        if not isinstance(one, _optimizer.DistributedOptimizer):
            raise UsageError(
                f"the optimizer is a {type(one).__name__}: MegatronState takes Megatron's DistributedOptimizer, which "
                "use_distributed_optimizer=True makes"
            )
        config = one.config
        for option in ("use_precision_aware_optimizer", "optimizer_cpu_offload"):
            if getattr(config, option, False):
                raise UsageError(
                    f"{option} is on: the optimizer keeps its main parameters where Rekindle has never saved them from"
                )
        if one.ddp_config.use_megatron_fsdp:
            raise UsageError("use_megatron_fsdp is on: its DTensors need no MegatronState; save them by themselves")
        if any(_fp8.is_float8tensor(parameter) for parameter in one.model_param_gbuf_map):
            raise UsageError("weights in fp8 are trained: their scales are not saved by Rekindle; train in bf16")
    return found


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Makes the optimizer's state, as its first update would, so that a restore has something to fill."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            kept = optimizer.state[parameter]
            if not kept and not hasattr(optimizer, "initialize_state"):
                kept["step"] = torch.zeros((), dtype=torch.float32)  # where torch's own keep it
            for moment in _MOMENTS:
                if moment not in kept:
                    kept[moment] = torch.zeros_like(parameter, requires_grad=False)
