"""Trains a small GPT-2 by Hugging Face's Trainer, and dies or goes on.

train_transformers.py ROOT OUT [--alone] [--die-before N [--die-rank N]] [--resume] [--trainer plain|mixin|sft] ...
"""

from __future__ import annotations

import argparse
import json
import os
import threading

import torch
from digests import digest
from dying import die
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from rekindle.integrations.transformers import RekindleMixin, attach

options = argparse.ArgumentParser()
options.add_argument("root")
options.add_argument("out", help="directory of the trainer's own checkpoints")
options.add_argument("--alone", action="store_true", help="trains without Rekindle")
options.add_argument("--die-before", type=int, help="the update that is not made any more")
options.add_argument("--die-rank", type=int, help="the rank that dies; all do without it")
options.add_argument("--die-evaluating", action="store_true", help="dies in the evaluation behind that update")
options.add_argument("--end-at-start", action="store_true", help="is told to go before the first update")
options.add_argument("--resume", action="store_true", help="passes resume_from_checkpoint=True")
options.add_argument("--trainer", default="plain")
options.add_argument("--max-steps", type=int, default=-1)
options.add_argument("--workers", type=int, default=0)
options.add_argument("--batch", type=int, default=2, help="examples of a batch")
options.add_argument("--strategy", default="steps", help="when to evaluate: steps or epoch")
options.add_argument("--patience", type=int, default=100)
options.add_argument("--unseeded", action="store_true", help="shuffles by the global generator")
options.add_argument("--signal", default="KILL", help="dies by it")
options.add_argument("--lora", action="store_true", help="trains a PEFT model")
options.add_argument("--set", help="an argument of the trainer that is set to True")
options.add_argument("--own-loop", action="store_true", help="takes a trainer with a training loop of its own")
options.add_argument("--twice", action="store_true", help="attaches twice")
options.add_argument("--misspelt", action="store_true", help="attaches with a setting that nobody knows")
options.add_argument("--attach-late", action="store_true", help="attaches while it trains")
options.add_argument("--stream", action="store_true", help="takes data without a length")
given = options.parse_args()
rank = int(os.environ.get("RANK", 0))
sft = given.trainer == "sft"


class Dying(TrainerCallback):
    def on_train_begin(self, args, state, control, **others):
        if given.attach_late:
            attach(trainer, given.root)
        if given.end_at_start:
            die("TERM")
            threading.Event().wait(60)

    def on_pre_optimizer_step(self, args, state, control, **others):
        if not given.die_evaluating:
            self.die(state.global_step + 1)

    def on_evaluate(self, args, state, control, **others):
        if given.die_evaluating:
            self.die(state.global_step)

    def die(self, step: int) -> None:
        if step == given.die_before and given.die_rank in (None, rank):
            die(given.signal)


class Attached(RekindleMixin, Trainer):
    pass


class OwnLoop(Trainer):
    def _inner_training_loop(self, *args, **others):
        return super()._inner_training_loop(*args, **others)


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def examples(seed: int, count: int) -> list[dict[str, list[int]]]:
    numbers = torch.Generator().manual_seed(seed)
    rows = [torch.randint(64, (8,), generator=numbers).tolist() for _ in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


set_seed(3)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2))
if given.lora:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=4, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
    model = get_peft_model(model, lora)
settings = dict(
    output_dir=given.out,
    per_device_train_batch_size=given.batch,
    gradient_accumulation_steps=2,
    num_train_epochs=2,
    max_steps=given.max_steps,
    learning_rate=1e-2,
    lr_scheduler_type="cosine",
    warmup_steps=2,
    logging_steps=3,
    logging_first_step=True,
    eval_strategy=given.strategy,
    eval_steps=4,
    eval_on_start=True,
    save_strategy="steps" if given.strategy == "steps" else "no",
    save_steps=4,
    metric_for_best_model="eval_loss",
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
    seed=5,
    dataloader_num_workers=given.workers,
)
if given.unseeded:
    settings["accelerator_config"] = {"use_seedable_sampler": False}
if given.set:
    settings[given.set] = True
data = dict(train_dataset=examples(1, 44), eval_dataset=examples(2, 8))
if given.stream:
    data["train_dataset"] = Stream(data["train_dataset"])
callbacks = [EarlyStoppingCallback(given.patience), Dying()]
if sft:
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "[EOS]": 1}, "[UNK]"))
    words = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", eos_token="[EOS]", pad_token="[EOS]")
    data = {name: Dataset.from_list([{"input_ids": one["input_ids"]} for one in rows]) for name, rows in data.items()}
    trainer = SFTTrainer(model=model, args=SFTConfig(**settings), processing_class=words, callbacks=callbacks, **data)
elif given.trainer == "mixin" and not given.alone:
    trainer = Attached(
        model=model, args=TrainingArguments(**settings), callbacks=callbacks, rekindle_root=given.root, **data
    )
else:
    kind = OwnLoop if given.own_loop else Trainer
    trainer = kind(model=model, args=TrainingArguments(**settings), callbacks=callbacks, **data)
attachment = None
if not (given.alone or given.attach_late or given.trainer == "mixin"):
    attachment = attach(trainer, given.root, **{"keep_evry": 2} if given.misspelt else {})
    if given.twice:
        attach(trainer, given.root)
done = trainer.train(resume_from_checkpoint=True if given.resume else None)
log = [
    {key: value for key, value in entry.items() if not key.endswith(("_runtime", "_per_second"))}
    for entry in trainer.state.log_history
]
counters = [
    one.early_stopping_patience_counter
    for one in trainer.callback_handler.callbacks
    if hasattr(one, "early_stopping_patience_counter")
]
if attachment is not None:
    metrics = attachment.checkpointer.metrics
    print("start", metrics.restored_step, metrics.restored_from, flush=True)
print("weights", digest(trainer.model.state_dict()), flush=True)
print("optimizer", digest(trainer.optimizer.state_dict()), flush=True)
print("schedule", trainer.lr_scheduler.last_epoch, trainer.lr_scheduler.get_last_lr(), flush=True)
print("log", json.dumps(log), flush=True)
print("train_loss", repr(done.training_loss), done.global_step, flush=True)
print("callbacks", counters, flush=True)
