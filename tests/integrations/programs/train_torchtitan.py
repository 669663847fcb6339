"""Trains torchtitan's debug model, made smaller, by torchtitan's own trainer on a CPU, and dies or goes on.

train_torchtitan.py DUMP_FOLDER RESULTS [options], under torchrun. RESULTS gets a file of losses and one of the end.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pickle
import random
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torchtitan.tools.utils as titan
from digests import digest

# Torchtitan knows GPUs only. Whatever else it imports takes the device from this module.
titan.device_type, titan.device_module = (
    "cpu",
    SimpleNamespace(
        **vars(torch.cpu)
        | {
            "current_device": lambda: 0,
            "empty_cache": lambda: None,
            "get_device_name": lambda device=None: "CPU",
            "get_device_properties": lambda device=None: SimpleNamespace(name="CPU", total_memory=1 << 30),
            "memory_stats": lambda device=None: {},
            "reset_peak_memory_stats": lambda: None,
        }
    ),
)

from datasets import Dataset  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan import train as titan_train  # noqa: E402
from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.distributed import utils as titan_distributed  # noqa: E402
from torchtitan.hf_datasets import DatasetConfig  # noqa: E402
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

if not hasattr(torch.distributed, "set_timeout"):  # newer torch has it, and the trainer calls it after its first step
    titan_distributed.set_pg_timeouts = lambda **options: None

EXAMPLE = Path(__file__).parents[3] / "examples/train_torchtitan.py"

options = argparse.ArgumentParser()
options.add_argument("dump_folder", type=Path)
options.add_argument("results", type=Path)
options.add_argument("--steps", type=int, default=14)
options.add_argument("--alone", action="store_true", help="trains without Rekindle, and without checkpoints")
options.add_argument("--own", action="store_true", help="trains without Rekindle, with torchtitan's checkpoints")
options.add_argument("--die-before", type=int, help="the update that is not made, at the first start of a launcher")
options.add_argument("--die-validating", type=int, help="the step whose validation is not done")
options.add_argument("--die-rank", type=int, help="the rank that dies; all do without it")
options.add_argument("--by", default="KILL", help="the signal of its death")
options.add_argument("--hold-before", type=int, nargs="*", default=[], help="updates that wait for RESULTS/go-UPDATE")
options.add_argument("--late", type=float, default=0, help="the seconds that rank 1 is late to load")
options.add_argument("--replicate", action="store_true", help="has all weights on all ranks")
options.add_argument("--checkpoint", type=json.loads, default={}, help="options of the manager")
options.add_argument("--arguments", nargs="*", default=[], help="further arguments of torchtitan, without their dashes")
given = options.parse_args()
rank = int(os.environ["RANK"])
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "then", "back", "again"]


class Letters(BaseTokenizer):
    """Takes each byte of a text for a token."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, *, tokenizer_path):
        super().__init__()
        self.eos_id = 0

    def encode(self, text, add_bos=False, add_eos=False):
        return [1] * add_bos + list(text.encode()) + [0] * add_eos

    def decode(self, tokens):
        return bytes(tokens).decode()

    def get_vocab_size(self):
        return 256


def rows(path):
    chosen = random.Random(5)
    return Dataset.from_list([{"text": " ".join(chosen.choices(WORDS, k=12))} for _ in range(10)])


DATASETS["words"] = DatasetConfig(path="", loader=rows, sample_processor=lambda row: row["text"])


def config() -> Trainer.Config:
    """Returns the configuration of the example, for two small layers on a CPU. torchtitan calls it by its name."""
    spec = importlib.util.spec_from_file_location("example", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    made = example.debugmodel()
    made.model_spec.model.layers = made.model_spec.model.layers[:2]
    for layer in made.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    made.hf_assets_path = str(given.results)
    made.tokenizer = Letters.Config()
    made.dataloader = HuggingFaceTextDataLoader.Config(dataset="words")
    made.training = replace(
        made.training,
        local_batch_size=2,
        seq_len=16,
        steps=given.steps,
        mixed_precision_param="float32",
        disable_cuda_graphs=True,
    )
    made.parallelism.data_parallel_replicate_degree = int(os.environ["WORLD_SIZE"]) if given.replicate else 1
    made.parallelism.spmd_backend = "partial_dtensor"  # the default one needs a newer torch
    made.validator = replace(made.validator, enable=True, freq=4, steps=2, dataloader=replace(made.dataloader))
    made.debug = replace(made.debug, seed=3, enable_structured_logging=False)
    first = {"enable_first_step_checkpoint": True}  # which waits for memory, so that each step behind it has a snapshot
    made.checkpoint = replace(made.checkpoint, **first, **given.checkpoint)
    if given.alone:
        made.checkpoint = CheckpointManager.Config(enable=False)
    elif given.own:
        made.checkpoint = CheckpointManager.Config(enable=True, interval=4, last_save_model_only=False)
    return made


def die() -> None:
    if given.die_rank in (None, rank) and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        os.kill(os.getpid(), getattr(signal, f"SIG{given.by}"))


def hold(step: int) -> None:
    """Stands still until the test says go."""
    (given.results / f"held-{step}-{rank}").touch()
    deadline = time.monotonic() + 120
    while not (given.results / f"go-{step}").exists():
        assert time.monotonic() < deadline, "nobody says go"
        time.sleep(0.01)


def before_update(step: int) -> None:
    if step in given.hold_before:
        hold(step)
    if step == given.die_before:
        die()


def local(state):
    return {name: value.to_local() if hasattr(value, "to_local") else value for name, value in state.items()}


def weights(trainer):
    return digest(local({name: value for part in trainer.model_parts for name, value in part.state_dict().items()}))


def watch(trainer: Trainer, found: dict[str, object]) -> None:
    """Adds dropout, which Llama has none of, and what is to be seen or to go wrong in training."""
    layer = trainer.model_parts[0].layers["0"]
    layer.register_forward_hook(lambda module, args, out: torch.nn.functional.dropout(out, 0.1, module.training))
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other one
    inner = trainer.optimizers.optimizers[0]
    inner.register_step_pre_hook(lambda *_: before_update(trainer.step))
    metrics, validator, checkpointer = trainer.metrics_processor, trainer.validator, trainer.checkpointer
    log, log_validation, load, post = (
        metrics.log,
        metrics.log_validation,
        checkpointer.load,
        validator.post_dataloading_process,
    )

    def note(*values):
        with open(given.results / f"losses-{rank}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")

    def logged(step, average, highest, norm, **more):
        note("train", step, average, highest, norm)
        log(step, average, highest, norm, **more)

    def validated(loss, step):
        note("validation", step, loss)
        log_validation(loss=loss, step=step)

    def processed(*args):
        if trainer.step == given.die_validating:
            die()
        return post(*args)

    def loaded(step=-1):
        time.sleep(given.late * (rank == 1))
        load(step)
        found["start"], found["loaded"] = trainer.step, weights(trainer)
        found["hooks"] = len(inner._optimizer_step_pre_hooks)

    metrics.log, metrics.log_validation = logged, validated
    validator.post_dataloading_process, checkpointer.load = processed, loaded


def trained(trainer: Trainer) -> None:
    """Trains, and writes down what came of it. Takes the place of ``Trainer.train``."""
    found: dict[str, object] = {}
    watch(trainer, found)
    train(trainer)
    place = {key: pickle.loads(v) if isinstance(v, bytes) else v for key, v in trainer.dataloader.state_dict().items()}
    found |= {
        "weights": weights(trainer),
        "optimizer": digest(local(trainer.optimizers.state_dict())),
        "schedule": [trainer.lr_schedulers.state_dict(), trainer.lr_schedulers.get_metrics()],
        "data": digest(place),
        "trainer": trainer.state_dict(),
        "random": digest(torch.get_rng_state()),
    }
    (given.results / f"end-{rank}.json").write_text(json.dumps(found))


train, Trainer.train = Trainer.train, trained

if __name__ == "__main__":
    further = [f"--{argument}" for argument in given.arguments]
    sys.argv[1:] = ["--module", "__main__", "--config", "config", "--dump_folder", str(given.dump_folder), *further]
    titan_train.main()
