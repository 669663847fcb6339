"""Trains a few million parameters inside of one framework, for ``frameworks.py``, by the Python of its environment.

    frameworks_job.py FRAMEWORK RESULT ROOT STEPS with|alone

``alone`` imports nothing of Rekindle. All else is the same script: what differs is what a user adds.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from training import Training

_STATE = 32 << 20
"""Bytes of parameters and AdamW's moments: beyond what is copied inside of ``step()``."""
_EVERY_STEP = {"snapshot_every": 1}
"""For each adapter but torchtitan's, whose ``interval`` is 1. The default would have the price decide."""
_BATCH = 4
_TOKENS = 33
_PROGRAMS = Path(__file__).resolve().parent.parent / "tests" / "integrations" / "programs"


class Watch:
    """Times steps by the moments at which the model's forward pass begins, and knows each Checkpointer that is made."""

    def __init__(self, root: str, steps: int, saved: bool) -> None:
        self.root, self.steps, self.saved = root, steps, saved
        self._moments: list[float] = []
        self._made: list[Any] = []
        self._bytes = 0
        torch.set_num_threads(1)
        torch.manual_seed(0)

    def begin(self, model: Any) -> None:
        """Watches a model from now on."""
        self._bytes = 3 * sum(parameter.nbytes for parameter in model.parameters())
        model.register_forward_pre_hook(self._note)
        if self.saved:
            import rekindle

            init, made = rekindle.Checkpointer.__init__, self._made

            def note(checkpointer: Any, *args: Any, **options: Any) -> None:
                made.append(checkpointer)
                init(checkpointer, *args, **options)

            rekindle.Checkpointer.__init__ = note

    def _note(self, model: Any, _: object) -> None:
        if model.training:
            self._moments.append(time.perf_counter())

    def write(self, path: str, package: str) -> None:
        """Writes the seconds of each step but the last, which ends with the training, and the number of snapshots."""
        assert len(self._moments) == self.steps, f"{len(self._moments)} forward passes in {self.steps} steps"
        found = {
            "seconds": [after - before for before, after in pairwise(self._moments)],
            "snapshots": sum(checkpointer.metrics.saves for checkpointer in self._made),
            "bytes": self._bytes,
            "version": importlib.metadata.version(package),
        }
        Path(path).write_text(json.dumps(found))


def _batches(model: Any, steps: int) -> torch.utils.data.DataLoader[Any]:
    rows = torch.randint(model.embedding.num_embeddings, (steps * _BATCH, _TOKENS))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=_BATCH, shuffle=True)


def _loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    found = model(tokens[:, :-1])
    return torch.nn.functional.cross_entropy(found.flatten(0, 1), tokens[:, 1:].flatten())


def train_transformers(watch: Watch) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    config = GPT2Config(vocab_size=256, n_positions=_TOKENS, n_embd=192, n_layer=6, n_head=6)
    model = GPT2LMHeadModel(config)
    rows = torch.randint(256, (watch.steps * _BATCH, _TOKENS)).tolist()
    settings = TrainingArguments(
        output_dir=f"{watch.root}-trainer",
        max_steps=watch.steps,
        per_device_train_batch_size=_BATCH,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model=model, args=settings, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    watch.begin(model)
    if watch.saved:
        from rekindle.integrations.transformers import attach

        attach(trainer, watch.root, **_EVERY_STEP)
    trainer.train()


def train_accelerate(watch: Watch) -> None:
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), Training(_STATE).model
    watch.begin(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, _batches(model, watch.steps))

    def train() -> Iterator[int]:
        for step, (tokens,) in enumerate(loader, 1):
            accelerator.backward(_loss(model, tokens))
            optimizer.step()
            optimizer.zero_grad()
            yield step

    if not watch.saved:
        for _ in train():
            pass
        return
    from rekindle.integrations.accelerate import checkpointer

    ckpt = checkpointer(accelerator, watch.root, **_EVERY_STEP)
    ckpt.restore()
    with ckpt, ckpt.guard():
        for step in train():
            ckpt.step(step)


def train_lightning(watch: Watch) -> None:
    import lightning

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Training(_STATE).model

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return _loss(self.model, batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    net, callbacks = Net(), []
    watch.begin(net.model)
    if watch.saved:
        from rekindle.integrations.lightning import RekindleCallback

        callbacks.append(RekindleCallback(watch.root, **_EVERY_STEP))
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=f"{watch.root}-trainer",
    )
    trainer.fit(net, _batches(net.model, watch.steps))


def train_torchtitan(watch: Watch) -> None:
    """Has torchtitan's own trainer train on a CPU, by the program of the tests, of which the sizes are changed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in alone.items()}}
    results = Path(f"{watch.root}-results")
    results.mkdir()
    sys.path.insert(0, str(_PROGRAMS))
    sys.argv[1:] = [
        f"{watch.root}-trainer",
        str(results),
        "--steps",
        str(watch.steps),
        *([] if watch.saved else ["--alone"]),
    ]
    import train_torchtitan as program
    from torchtitan import train

    config, watch_training = program.config, program.watch

    def larger() -> Any:
        made = config()
        made.training = replace(made.training, local_batch_size=_BATCH, seq_len=64)  # the loss has eight chunks
        made.validator = replace(made.validator, freq=10**6)
        return made

    def watch_both(trainer: Any, found: dict[str, object]) -> None:
        watch_training(trainer, found)
        watch.begin(trainer.model_parts[0])

    program.config, program.watch = larger, watch_both
    sys.argv[1:] = ["--module", program.__name__, "--config", "config", "--dump_folder", f"{watch.root}-trainer"]
    train.main()


def _train_in_ray(config: dict[str, Any]) -> None:
    """The train function, in a thread of a worker of Ray's."""
    import ray.train

    watch = Watch("", config["steps"], config["saved"])
    model = Training(_STATE).model
    watch.begin(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def train() -> Iterator[int]:
        for step, (tokens,) in enumerate(_batches(model, watch.steps), 1):
            _loss(model, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield step

    if watch.saved:
        from rekindle import Checkpointer
        from rekindle.integrations.ray import leave, notices, report, root

        ckpt = Checkpointer(root(), {"model": model, "optimizer": optimizer}, **_EVERY_STEP)
        ckpt.restore()
        with ckpt, ckpt.guard(notices=notices(), on_exit=leave):
            for step in train():
                ckpt.step(step)
        report(ckpt, {"steps": watch.steps})  # not between steps: Ray takes one report in two seconds
    else:
        for _ in train():
            pass
        ray.train.report({"steps": watch.steps})
    watch.write(config["result"], "ray")


def train_ray(watch: Watch, result: str) -> None:
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    temporary = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # names of sockets are short
    try:
        ray.init(num_cpus=2, object_store_memory=100 << 20, include_dashboard=False, _temp_dir=temporary)
        TorchTrainer(
            _train_in_ray,
            train_loop_config={"steps": watch.steps, "saved": watch.saved, "result": result},
            scaling_config=ScalingConfig(num_workers=1),
            run_config=RunConfig(name="bench", storage_path=watch.root),
        ).fit()
        ray.shutdown()
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


TRAIN = {
    "transformers": train_transformers,
    "accelerate": train_accelerate,
    "lightning": train_lightning,
    "torchtitan": train_torchtitan,
}


def main() -> None:
    framework, result, root, steps, how = sys.argv[1:]
    watch = Watch(root, int(steps), how == "with")
    if framework == "ray":
        train_ray(watch, result)
        return
    TRAIN[framework](watch)
    watch.write(result, framework)


if __name__ == "__main__":
    main()
