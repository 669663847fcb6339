"""Trains on the nodes of a Ray cluster. After a failure each worker goes on from whichever node's memory has its state.

    ray start --head                                        on the first node
    ray start --address FIRST:6379                          on the others
    python examples/ray/train.py /shared/runs/17 --workers 2

Ray places the workers, and starts all of them again when one ends. Rekindle's part is six lines, as without Ray.
"""

import argparse
import logging
from pathlib import Path

import ray.train
import torch
from ray.train.torch import TorchTrainer, get_device
from torch import nn

import rekindle

BATCH, WIDTH = 32, 256


def train(config: dict) -> None:
    """Trains, on each worker."""
    rank = ray.train.get_context().get_world_rank()
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s [{rank}] %(message)s", force=True)
    device = get_device()

    torch.manual_seed(rank)  # dropout and data differ from rank to rank; DDP gives all of them the weights of rank 0
    layers = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH)
    model = nn.Sequential(*layers).to(device)
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    ckpt = rekindle.Checkpointer(config["root"], {"model": model, "optimizer": optimizer})
    done = ckpt.restore()
    with ckpt.guard(notices=()):  # Ray trains in a thread of its worker, where signals can't be taken
        for step in range(done + 1, config["steps"] + 1):
            # Torch's random generator is restored with the rest, so the order of the data goes on where it was.
            numbers = torch.rand(BATCH, WIDTH).to(device)
            loss = nn.functional.mse_loss(parallel(numbers), numbers.sort().values)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ckpt.step(step)
            logging.info("step %d loss %.4f", step, loss.item())
    ckpt.close()
    ray.train.report({"step": config["steps"]})


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network to sort, on the nodes of a Ray cluster.")
    parser.add_argument("root", help="directory for the checkpoints, on a file system that all nodes share, or a URL")
    parser.add_argument("--workers", type=int, default=2, help="ranks in all (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=500, help="optimizer updates in all (default: %(default)s)")
    args = parser.parse_args()

    root = args.root if "://" in args.root else str(Path(args.root).absolute())  # workers have other directories
    ray.init(address="auto")
    TorchTrainer(
        train,
        train_loop_config={"root": root, "steps": args.steps},
        scaling_config=ray.train.ScalingConfig(num_workers=args.workers, use_gpu=torch.cuda.is_available()),
        run_config=ray.train.RunConfig(
            storage_path=f"{root}-ray",  # what Ray keeps of a run: results, and no checkpoints
            failure_config=ray.train.FailureConfig(max_failures=10),
        ),
    ).fit()


if __name__ == "__main__":
    main()
