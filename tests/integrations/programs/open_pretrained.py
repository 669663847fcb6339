"""Makes a small GPT-2 and saves steps of it, or opens a folder as ``from_pretrained`` does.

open_pretrained.py save ROOT FOLDER | open FOLDER
"""

from __future__ import annotations

import sys

import torch
from digests import digest
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, set_seed

import rekindle

what, *places = sys.argv[1:]
if what == "save":
    set_seed(3)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with rekindle.Checkpointer(places[0], {"model": model, "optimizer": optimizer}) as ckpt:
        batch = torch.randint(64, (2, 16))
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        ckpt.save(1, wait="durable", timeout=60)
    model.config.save_pretrained(places[1])
else:
    model, told = AutoModelForCausalLM.from_pretrained(places[0], output_loading_info=True)
    print("keys", sorted(told["missing_keys"]), sorted(told["unexpected_keys"]))
    print("tied", model.lm_head.weight is model.transformer.wte.weight)
print("weights", digest(dict(model.state_dict())))
