"""A program that uses mindio_ttp as its users do: client.py FOLDER STEPS PAUSE [FAULT MOMENT VICTIM].

After the published way to adapt a framework: controller and processor at initialisation, replica groups in halves of
the data-parallel group, an optimizer whose shards each half holds once, ends of updates, the decorator around
``train``, and callbacks that write a folder, which gets its name at last. It knows nothing of Rekindle. What happens
is written to FOLDER/events, one line of JSON each.
"""

import hashlib
import json
import os
import random
import signal
import sys
import time

import torch
import torch.distributed as dist
from mindio_ttp import framework_ttp as ttp
from mindio_ttp.controller_ttp import tft_register_mindx_callback
from mindio_ttp.framework_ttp.ttp_decorator import tft_get_repair_type, tft_report_load_ckpt_step

FOLDER, STEPS, PAUSE, FAULT, MOMENT, VICTIM = (*sys.argv[1:], *["", "", "-1"])[:6]
TRACKER = os.path.join(FOLDER, "latest_checkpointed_iteration.txt")
AT = 5
"""The step in which the fault strikes."""
WIDTH = 32


def tell(event, **more):
    line = json.dumps({"rank": dist.get_rank(), "event": event, "at": time.monotonic(), **more}) + "\n"
    with open(os.path.join(FOLDER, "events"), "a") as out:
        out.write(line)


class ReplicaOptimizer:
    """Adam over one flat tensor. Each half of the ranks holds all shards of its state once."""

    def __init__(self, flat):
        self.flat, self.world, self.rank = flat, dist.get_world_size(), dist.get_rank()
        self.shards = max(1, self.world // 2)
        self.at = self.rank % self.shards
        halves = [list(range(start, start + self.shards)) for start in range(0, self.world, self.shards)]
        groups = [dist.new_group(half) for half in halves]
        self.half = groups[self.rank // self.shards]
        size = flat.numel() // self.shards
        self.mine = slice(self.at * size, (self.at + 1) * size)
        self.state = {"param": flat[self.mine].clone(), "avg": torch.zeros(size), "square": torch.zeros(size)}

    def gather(self):
        parts = [torch.empty_like(self.state["param"]) for _ in range(self.shards)]
        dist.all_gather(parts, self.state["param"], group=self.half)
        self.flat.copy_(torch.cat(parts))

    def step(self, grad, step):
        dist.barrier()
        ttp.tft_start_updating_os(-1)
        tell("updating", step=step)
        state, grad = self.state, grad[self.mine]
        state["avg"].mul_(0.9).add_(grad, alpha=0.1)
        strike("update", step)
        state["square"].mul_(0.99).addcmul_(grad, grad, value=0.01)
        state["param"].addcdiv_(state["avg"], state["square"].sqrt().add_(1e-6), value=-0.01)
        ttp.tft_end_updating_os(step)


def wait_for_updates(step):
    """Returns when all ranks are in their update: one that has not left the barrier by now could not make it."""
    for _ in range(6000):
        with open(os.path.join(FOLDER, "events")) as told:
            events = [json.loads(line) for line in told if line.endswith("\n")]
        if sum(event["event"] == "updating" and event["step"] == step for event in events) == dist.get_world_size():
            return
        time.sleep(0.01)
    raise TimeoutError("not all ranks came to their update")


def strike(moment, step):
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if not (first and step == AT and moment == MOMENT and dist.get_rank() in map(int, VICTIM.split(","))):
        return
    if moment == "update":
        wait_for_updates(step)
    tell("strike", step=step, fault=FAULT)
    if FAULT == "raise":
        raise RuntimeError("Other ERROR")
    if FAULT.startswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    if FAULT == "hang":
        time.sleep(1000)
    if FAULT == "report":
        ttp.tft_report_error(ttp.ReportState.RS_HCCL_FAILED.value)
        assert ttp.tft_wait_next_action() == ttp.Action.EXIT.value
        assert (ttp.tft_get_repair_step(), tft_get_repair_type()) == (AT - 1, "dump")
        os._exit(1)


def save(step, save_info, args, ctx):
    """Writes this rank's shard, and with the first one what all ranks share. In place of the stock one, all at once."""
    optimizer = ctx["optimizer"]
    (info,) = save_info
    tell("save", step=step, info=info, args=args[0], generator=digest(torch.get_rng_state()))
    assert info["type"] == ttp.OptimizerType.ATTENTION.value
    if FAULT == "kill-twice" and dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT == "kill-slow":
        time.sleep(35)  # longer than torchrun lets a rank take to end
    place = os.path.join(FOLDER, f"iter_{step:07d}_tmp")
    os.makedirs(place, exist_ok=True)
    at = info["ranks"].index(optimizer.rank)
    part = {"step": step, "shard": optimizer.at, "state": optimizer.state}
    if at == 0:
        part["generators"] = torch.get_rng_state(), random.getstate()
    torch.save(part, os.path.join(place, f"shard-{at}.pt"))
    tell("saved", step=step, shard=at)


def rename(step, args):
    name = f"iter_{step:07d}"
    tell("rename", step=step, parts=sorted(os.listdir(os.path.join(FOLDER, name + "_tmp"))))
    os.rename(os.path.join(FOLDER, name + "_tmp"), os.path.join(FOLDER, name))
    with open(TRACKER, "w") as out:
        out.write(str(step))


def load(optimizer):
    """Returns the step that is loaded; 0 if there is none."""
    if not os.path.exists(TRACKER):
        return 0
    with open(TRACKER) as tracker:
        step = int(tracker.read())
    place = os.path.join(FOLDER, f"iter_{step:07d}")
    parts = [torch.load(os.path.join(place, name), weights_only=False) for name in sorted(os.listdir(place))]
    assert [part["shard"] for part in parts] == list(range(optimizer.shards))
    assert {part["step"] for part in parts} == {step}
    for name, value in parts[optimizer.at]["state"].items():
        optimizer.state[name].copy_(value)
    torch.set_rng_state(parts[0]["generators"][0])
    random.setstate(parts[0]["generators"][1])
    tell("loaded", step=step)
    tft_report_load_ckpt_step(step)
    return step


def register(context):
    ttp.tft_register_save_ckpt_handler(save, context)
    ttp.tft_register_rename_handler(rename)
    ttp.tft_register_stop_handler(lambda args, ctx: tell("stop"))
    ttp.tft_register_clean_handler(lambda is_uce, args, ctx: tell("clean", uce=is_uce) or 0)
    ttp.tft_register_exit_handler(lambda ctx: tell("exit"))
    for name in ("repair", "rollback", "rebuild_group", "stream_sync", "zit_downgrade_rebuild", "zit_upgrade_repair"):
        getattr(ttp, f"tft_register_{name}_handler")(lambda *any: tell("never"))
    ttp.tft_register_exception_handler("Other ERROR", "RS_UNKNOWN", lambda text: tell("handled", text=text) or "seen")
    for action in ("report_stop_complete", "report_strategies", "report_result"):
        tft_register_mindx_callback(action, lambda *words, action=action: tell(action, words=words))
    tft_register_mindx_callback("report_fault_ranks", lambda faults: tell("report_fault_ranks", faults=faults))


def digest(tensor):
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]


@ttp.tft_exception_handler
def train(name, optimizer, shape, start):
    for step in range(start + 1, int(STEPS) + 1):
        ttp.tft_pause_train(step)
        optimizer.gather()
        weights = optimizer.flat.detach().view(shape).requires_grad_()
        data = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step * 100 + dist.get_rank()))
        hidden = torch.nn.functional.dropout(torch.tanh(data @ weights), 0.5)  # the same draws on all ranks
        time.sleep(float(PAUSE))  # else all steps are over before an agent could hear of a fault
        strike("forward", step)
        loss = (hidden.sum(1) - random.random()).square().mean()
        loss.backward()
        grad = weights.grad.flatten()
        dist.all_reduce(grad)
        optimizer.step(grad, step)
        tell("step", step=step, generator=digest(torch.get_rng_state()))
    return step


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    random.seed(0)
    if rank == 0:
        ttp.tft_init_controller(rank, world, False, enable_arf=True)
        ttp.tft_start_controller("127.0.0.1", 8000, False, "")
    ttp.tft_init_processor(rank, world, False, False, "", True, True)
    ttp.tft_start_processor("127.0.0.1", 8000)
    assert not ttp.tft_is_reboot_node()
    optimizer = ReplicaOptimizer(torch.randn(WIDTH * WIDTH))
    ttp.tft_set_optimizer_replica(rank, [{"rank_list": list(range(world)), "replica_cnt": 2, "replica_shift": 0}])
    ttp.tft_set_dp_group_info(rank, list(range(world)))
    register({"optimizer": optimizer})
    start = load(optimizer)
    if start < int(STEPS):
        train("the trainer", optimizer, (WIDTH, WIDTH), start)
    optimizer.gather()
    tell("end", digest=digest(optimizer.flat), generator=digest(torch.get_rng_state()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
