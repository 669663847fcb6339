"""Runs one turn of one contender in a process of its own: ``python worker.py '<json of Task>'``."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path

from task import Task


def main() -> None:
    warnings.filterwarnings("ignore")  # torch's, about itself
    logging.disable(logging.WARNING)  # dlrover's and orbax's, about every save
    # Imported only now, as importing them warns.
    import torch
    from growth import run_bytes, run_history, run_ranks, run_tensors
    from loads import run_load
    from loop import run_loop
    from ready_job import run_floor, run_ready
    from saves import run_calibrate, run_drain, run_saves
    from start import run_first

    parts = {
        "calibrate": run_calibrate,
        "saves": run_saves,
        "drain": run_drain,
        "loop": run_loop,
        "load": run_load,
        "tensors": run_tensors,
        "bytes": run_bytes,
        "ranks": run_ranks,
        "history": run_history,
        "first": run_first,
        "floor": run_floor,
        "ready": run_ready,
    }
    task = Task(**json.loads(sys.argv[1]))
    torch.set_num_threads(task.threads)
    # run_saves ends its process by a signal, so each part writes down what it found by itself.
    parts[task.part](task, lambda result: Path(task.result).write_text(json.dumps(result)))


if __name__ == "__main__":
    main()
