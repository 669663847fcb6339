"""Trains a small GPT on the source of Python's standard library, and survives faults.

    python examples/train_gpt.py runs/gpt                             one process
    rekindle run --nproc-per-node 2 examples/train_gpt.py runs/gpt    two ranks, started again after a fault

Kill it in any way you like. It goes on behind the last completed step and ends with the weights that it would have had
without the fault: bit for bit on a CPU with one or two ranks (with more, DistributedDataParallel sums the first
gradients of each start in another order); on a GPU that takes torch.use_deterministic_algorithms(True) besides.
"""

import argparse
import logging
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import rekindle

BATCH, CONTEXT, LAYERS = 8, 128, 4


class GPT(nn.Module):
    """Predicts each next byte of a text from the bytes before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 32, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.head.weight = self.token.weight  # tied: the same weights embed bytes and predict them
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device)
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        return self.head(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT on the source of Python's standard library.")
    parser.add_argument("root", help="directory for the checkpoints")
    parser.add_argument("--steps", type=int, default=200, help="optimizer updates in all (default: %(default)s)")
    parser.add_argument("--width", type=int, default=128, help="features, a multiple of 32 (default: %(default)s)")
    parser.add_argument("--compile", action="store_true", help="compile the model with torch.compile")
    args = parser.parse_args()

    rank = int(os.environ.get("RANK", 0))
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s [{rank}] %(message)s")
    gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # one for each rank, or none
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)  # else a rank's calls that name no device would go to the first one
    if dist.is_torchelastic_launched():
        dist.init_process_group("nccl" if gpu else "gloo")

    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = torch.frombuffer(bytearray().join(file.read_bytes() for file in files), dtype=torch.uint8)

    torch.manual_seed(rank)  # dropout and data differ from rank to rank; DDP gives all of them the weights of rank 0
    model = GPT(args.width).to(device)
    train = nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model
    if args.compile:
        train = torch.compile(train)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=50)  # warm-up

    ckpt = rekindle.Checkpointer(args.root, {"model": model, "optimizer": optimizer, "scheduler": scheduler})
    done = ckpt.restore()
    with ckpt.guard():
        for step in range(done + 1, args.steps + 1):
            # Torch's random generator is restored with the rest, so the order of the data goes on where it was.
            start = torch.randint(len(text) - CONTEXT, (BATCH, 1))
            tokens = text[start + torch.arange(CONTEXT + 1)].to(device, torch.long)
            loss = nn.functional.cross_entropy(train(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            ckpt.step(step)
            logging.info("step %d loss %.4f", step, loss.item())
    ckpt.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
