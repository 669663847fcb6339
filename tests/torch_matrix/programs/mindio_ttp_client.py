"""The shortest client of mindio_ttp: of two ranks one dies, the other one dumps, and both go on from the dump."""

import os
import signal
import sys

import torch
import torch.distributed as dist
from mindio_ttp import framework_ttp as ttp

HERE = sys.argv[1]
os.chdir(HERE)
torch.set_num_threads(1)
dist.init_process_group("gloo")
RANK = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())


def save(step, save_info, args, ctx):
    torch.save({"step": step, "model": model.module.state_dict()}, "dump_tmp.pt")


def rename(step, args):
    os.rename("dump_tmp.pt", "dump.pt")


@ttp.tft_exception_handler
def train(start):
    for step in range(start + 1, 11):
        if step == 8 and RANK == 1 and not os.path.exists("killed-0-1"):
            open("killed-0-1", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        ttp.tft_start_updating_os(-1)
        optimizer.step()
        ttp.tft_end_updating_os(step)


ttp.tft_init_controller(RANK, 2, False)
if RANK == 0:
    ttp.tft_start_controller("127.0.0.1", 8000, False)
ttp.tft_init_processor(RANK, 2, False, False)
ttp.tft_start_processor("127.0.0.1", 8000)
ttp.tft_set_optimizer_replica(RANK, [{"rank_list": [0, 1], "replica_cnt": 2, "replica_shift": 0}])
ttp.tft_register_save_ckpt_handler(save)
ttp.tft_register_rename_handler(rename)

begun = 0
if os.path.exists("killed-0-1"):
    dumped = torch.load("dump.pt", weights_only=True)
    begun = dumped["step"]
    assert begun == 7, begun
    model.module.load_state_dict(dumped["model"])
train(begun)
dist.destroy_process_group()
