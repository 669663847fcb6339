"""Trains a small GPT by megatron-core on a CPU, with its distributed optimizer, and dies or goes on.

train_megatron.py ROOT RESULTS [options], under rekindle run. RESULTS gets a file of the end from each rank.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron_on_cpu  # noqa: F401  before anything of Megatron's
import torch
import torch.distributed as dist
from digests import digest
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core import parallel_state as parallel
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
    param_and_grad_buffer,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

import rekindle
from rekindle.integrations.megatron import MegatronState, install

options = argparse.ArgumentParser()
options.add_argument("root")
options.add_argument("results", type=Path)
options.add_argument("--steps", type=int, default=8)
options.add_argument("--tensor", type=int, default=1)
options.add_argument("--pipeline", type=int, default=1)
options.add_argument("--expert", type=int, default=1)
options.add_argument("--instances", type=int, default=1)
options.add_argument("--experts", type=int, help="of each layer; dense without it")
options.add_argument("--overlap", action="store_true", help="gathers weights during the next forward pass")
options.add_argument("--hidden", type=int, default=32)
options.add_argument("--alone", action="store_true", help="trains without Rekindle")
options.add_argument("--deaths", type=json.loads, default=[], help="of each start of a launcher: step, point and rank")
options.add_argument("--save-again", type=int, help="the step under which what was restored is saved at the end")
options.add_argument("--own", choices=["save", "load"], help="saves by Megatron and dies, or loads and saves")
options.add_argument("--asynchronous", action="store_true", help="does so by its queue of asynchronous saves")
options.add_argument("--settings", type=json.loads, default={}, help="arguments of Checkpointer")
given = options.parse_args()
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
start_number = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
death = dict(enumerate(given.deaths)).get(start_number)
now = SimpleNamespace(step=0)
LENGTH, VOCABULARY, BATCH, MICROBATCHES = 8, 64, 2, 2


def at(point: str) -> None:
    """Dies here, if that is what was ordered."""
    if death == [now.step, point, rank]:
        (given.results / f"died-{start_number}").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def build() -> tuple[Any, Any, Any]:
    """Returns model, optimizer and schedule."""
    parallel.initialize_model_parallel(
        given.tensor,
        given.pipeline,
        expert_model_parallel_size=given.expert,
        num_distributed_optimizer_instances=given.instances,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=given.hidden,
        num_attention_heads=4,
        num_moe_experts=given.experts,
        moe_router_topk=2,
        moe_token_dispatcher_type="allgather",
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.01,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        tensor_model_parallel_size=given.tensor,
        pipeline_model_parallel_size=given.pipeline,
        expert_model_parallel_size=given.expert,
        sequence_parallel=bool(given.experts) and given.tensor > 1,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=given.experts),
        VOCABULARY,
        LENGTH,
        pre_process=parallel.is_pipeline_first_stage(),
        post_process=parallel.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
    ).bfloat16()
    wrapped = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            num_distributed_optimizer_instances=given.instances,
            overlap_grad_reduce=given.overlap,
            overlap_param_gather=given.overlap,
        ),
        model,
    )
    wrapped.broadcast_params()
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        min_lr=1e-4,
        weight_decay=0.1,
        bf16=True,
        params_dtype=torch.bfloat16,
        clip_grad=1.0,
        use_distributed_optimizer=True,
        overlap_param_gather=given.overlap,
    )
    optimizer = get_megatron_optimizer(settings, [wrapped], get_standard_config_overrides(settings))
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-2,
        min_lr=1e-4,
        lr_warmup_steps=4 * BATCH,
        lr_decay_steps=100 * BATCH,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if given.overlap:
        config.no_sync_func, config.param_sync_func = wrapped.no_sync, wrapped.start_param_sync
        config.grad_sync_func = None
    strike(model)
    return wrapped, optimizer, schedule


def strike(model: Any) -> None:
    """Lets this process die at any point of a step."""
    model.decoder.register_forward_pre_hook(lambda *_: at("forward"))
    next(iter(model.decoder.parameters())).register_hook(lambda grad: at("backward"))
    reduce = param_and_grad_buffer.dist_reduce_scatter_func

    def reduced(*args: Any, **kwargs: Any) -> Any:
        at("reduce")
        return reduce(*args, **kwargs)

    param_and_grad_buffer.dist_reduce_scatter_func = reduced
    init, groups = torch.optim.AdamW._init_group, iter(())

    def init_group(self: Any, group: Any, *args: Any) -> Any:
        nonlocal groups
        group_number = next(groups, None)
        if group_number is None:
            groups = iter(range(1, len(self.param_groups)))
        else:
            at("update")  # the first group has been updated
        return init(self, group, *args)

    torch.optim.AdamW._init_group = init_group


def batches(step: int) -> Any:
    """Yields the micro-batches of a step: those of this rank's place among the data-parallel ones."""
    source = torch.Generator().manual_seed(1000 * step + parallel.get_data_parallel_rank())
    for _ in range(MICROBATCHES):
        tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=source)
        yield tokens[:, :-1], tokens[:, 1:]


def forward(iterator: Any, model: Any) -> Any:
    tokens, labels = next(iterator)
    places = torch.arange(LENGTH).expand(BATCH, LENGTH)
    mask = torch.ones(LENGTH, LENGTH).tril()[None, None] < 0.5
    losses = model(tokens, places, mask, labels=labels)
    return losses, lambda found: (found.float().mean(), {"loss": found.float().mean().item()})


def one_step(model: Any, optimizer: Any, schedule: Any, args: Any) -> Any:
    model.zero_grad_buffer()
    optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=batches(now.step),
        model=[model],
        num_microbatches=MICROBATCHES,
        seq_length=LENGTH,
        micro_batch_size=BATCH,
    )
    done, _, _ = optimizer.step()
    assert done
    schedule.step(BATCH)
    args.consumed_train_samples += BATCH * MICROBATCHES * parallel.get_data_parallel_world_size()
    return [found["loss"] for found in losses]


def ends(model: Any, optimizer: Any, schedule: Any, args: Any) -> dict[str, Any]:
    """Returns digests of all that training has made on this rank."""
    model.start_param_sync(force_sync=True)
    torch_optimizers = [one.optimizer for one in optimizer.chained_optimizers]
    groups = [group for one in torch_optimizers for group in one.param_groups]
    state = [one.state[p] for one in torch_optimizers for group in one.param_groups for p in group["params"]]
    return {
        "weights": digest([(name, weight.detach()) for name, weight in model.named_parameters()]),
        "main": digest([parameter.detach() for group in groups for parameter in group["params"]]),
        "moments": digest(state),
        "groups": digest([{key: value for key, value in group.items() if key != "params"} for group in groups]),
        "schedule": digest(schedule.state_dict()),
        "tracker": digest(tensor_parallel.get_cuda_rng_tracker().get_states()),
        "random": digest(torch.get_rng_state()),
        "samples": args.consumed_train_samples,
    }


def held(optimizer: Any) -> int:
    """Returns the bytes of main parameters and moments on this rank."""
    inner = [one.optimizer for one in optimizer.chained_optimizers]
    parameters = [p for one in inner for group in one.param_groups for p in group["params"]]
    moments = [value for one in inner for state in one.state.values() for value in state.values()]
    return sum(tensor.nbytes for tensor in [*parameters, *moments] if tensor.numel() > 1)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("megatron").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, optimizer, schedule = build()
    args = SimpleNamespace(consumed_train_samples=0)
    torch.manual_seed(100 + rank // given.tensor)  # what tensor-parallel ranks have copies of stays alike
    if given.own:
        own_checkpoints(model, optimizer, schedule, args)
        return
    if given.alone:
        losses = {}
        for now.step in range(1, given.steps + 1):
            losses[now.step] = one_step(model, optimizer, schedule, args)
    else:
        state = MegatronState([model], optimizer, schedule, args)
        ckpt = rekindle.Checkpointer(given.root, {"megatron": state}, **given.settings)
        began = time.monotonic()
        start = ckpt.restore()
        print(f"rank {rank}: restored {start} in {time.monotonic() - began:.2f} s", flush=True)
        with open(given.results / f"starts-{rank}", "a") as out:
            print(start, file=out)
        losses = {}
        rare = given.settings.get("snapshot_every", 1) > 1  # then no snapshot covers an update that is broken off
        with ckpt.guard(watchdog="fast", fence=rare) as guard:
            assert guard.connected(30), "no agent"
            dist.barrier()
            for now.step in range(start + 1, given.steps + 1):
                losses[now.step] = one_step(model, optimizer, schedule, args)
                at("before-step")
                ckpt.step(now.step)
                at("after-step")
        if given.save_again:
            ckpt.save(given.save_again, wait="durable")
        ckpt.close()
    found = {"losses": losses, "end": ends(model, optimizer, schedule, args), "held": held(optimizer)}
    (given.results / f"end-{rank}.json").write_text(json.dumps(found))
    dist.barrier()


def sharded(model: Any, optimizer: Any, *, loading: bool) -> dict[str, Any]:
    """Describes the state as Megatron-LM does, with a form of the optimizer's that any layout can load."""
    metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
    weights = model.module.sharded_state_dict(metadata=metadata)
    return {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, is_loading=loading, metadata=metadata),
        "iteration": now.step,
    }


def save_own(model: Any, optimizer: Any, iteration: int) -> None:
    directory = Path(given.root) / f"iter_{iteration:07d}"
    directory.mkdir(parents=True, exist_ok=True)
    state = sharded(model, optimizer, loading=False)
    request = dist_checkpointing.save(state, str(directory), async_sharded_save=given.asynchronous)
    if request is not None:
        queue = AsyncCallsQueue()
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
        queue.close()


def own_checkpoints(model: Any, optimizer: Any, schedule: Any, args: Any) -> None:
    """Saves iteration 3, and dies; or loads it, and saves what it has loaded as iteration 4."""
    install()
    if given.own == "save":
        for now.step in range(1, 4):
            one_step(model, optimizer, schedule, args)
        save_own(model, optimizer, 3)
        (given.results / f"saved-{rank}").touch()
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    now.step = 1
    one_step(model, optimizer, schedule, args)  # torch's optimizers make their state so, and Megatron asks for it
    directory = str(Path(given.root) / "iter_0000003")
    loaded = dist_checkpointing.load(sharded(model, optimizer, loading=True), directory)
    model.module.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    assert loaded["iteration"] == 3
    save_own(model, optimizer, 4)
    (given.results / f"loaded-{rank}").touch()
    dist.barrier()


if __name__ == "__main__":
    main()
    os._exit(0)  # gloo's threads need no end
