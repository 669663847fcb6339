"""Makes of an exported model a folder that Hugging Face's ``from_pretrained`` opens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rekindle.errors import NotFoundError, UsageError
from rekindle.state.tree import entries
from rekindle.storage.catalog import StoredCopy
from rekindle.storage.listing import read_receipts
from rekindle.transfer.staging import write_file

__all__ = ["check_config", "copy_config", "model_of"]

_MODEL = "model"
"""Name by which most states have the model."""
_CONFIG = "config.json"
_SUFFIXES = (".json", ".jinja", ".model", ".py", ".tiktoken", ".txt")
"""Endings of what describes a model: its configuration, tokenizer, chat template, and code of its own."""
_TRAINING = ("adapter_config.json", "rekindle.json", "trainer_state.json")
"""Files with such an ending that say nothing of these weights."""
_LARGEST = 64_000_000
"""Bytes above which a file is no description; the largest tokenizers have some 30 MB."""


def model_of(copy: StoredCopy) -> str:
    """Returns the entry of a checkpoint's state that is the model: the one of that name, or the only one like a module.

    Raises NotFoundError where there is none, UsageError where there are several, CorruptError for damage.
    """
    try:
        structure = next(read_receipts(copy)).structure
    except FileNotFoundError as error:
        raise NotFoundError(f"{error.filename}: a newer step has just taken its place; try again") from None
    state = entries(structure)
    if _MODEL in state:
        return _MODEL
    found = [name for name, node in state.items() if _is_module(node)]
    there = ", ".join(map(str, state)) or "nothing"
    if not found:
        raise NotFoundError(f"step {copy.step} has no model in its state, which has {there}: --only names the entry")
    if len(found) > 1:
        raise UsageError(f"step {copy.step} has several models: --only names one of {', '.join(map(str, found))}")
    return str(found[0])


def _is_module(node: Any) -> bool:
    """True for a dictionary that has tensors itself. An optimizer has its own further down."""
    return any(isinstance(child, dict) and "$tensor" in child for child in entries(node).values())


def check_config(folder: Path) -> None:
    """Raises UsageError unless ``folder`` has the configuration of a model."""
    if not (folder / _CONFIG).is_file():
        raise UsageError(f"{folder}: has no {_CONFIG}: give a folder that save_pretrained() or a download has made")


def copy_config(folder: Path, directory: Path) -> None:
    """Copies what describes a model from ``folder`` to a new directory: no weights, nor anything of its training.

    Files of a download are links into its cache, so links are followed.
    """
    for path in sorted(folder.iterdir()):
        passed_over = path.name in _TRAINING or path.name.endswith(".index.json") or path.name.startswith(".")
        if path.suffix not in _SUFFIXES or passed_over or not path.is_file():
            continue
        if path.stat().st_size <= _LARGEST and not (directory / path.name).exists():
            write_file(directory / path.name, path.read_bytes())
