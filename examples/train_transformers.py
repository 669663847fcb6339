"""Fine-tunes a small GPT-2 by Hugging Face's Trainer, and survives faults.

    python examples/train_transformers.py runs/hf                             one process
    torchrun --nproc-per-node 2 examples/train_transformers.py runs/hf        two ranks

Kill it in any way you like, and start it again by the same command: it goes on behind the last completed step.
"""

import logging
import os
import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from rekindle.integrations.transformers import attach

CONTEXT = 64


def main(root: str) -> None:
    logging.basicConfig(level=logging.INFO)  # shows which step was restored, and from where
    text = b"".join(file.read_bytes() for file in sorted(Path(os.__file__).parent.glob("*.py"))[:20])
    rows = [list(text[at : at + CONTEXT]) for at in range(0, len(text) - CONTEXT, CONTEXT)]
    size = {"vocab_size": 256, "n_positions": CONTEXT, "n_embd": 128, "n_layer": 2, "n_head": 4}
    set_seed(0)
    trainer = Trainer(
        model=GPT2LMHeadModel(GPT2Config(**size, bos_token_id=None, eos_token_id=None)),  # bytes have no such tokens
        args=TrainingArguments(
            output_dir=f"{root}-trainer",
            max_steps=200,
            logging_steps=10,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    )
    attach(trainer, root)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main(sys.argv[1])
