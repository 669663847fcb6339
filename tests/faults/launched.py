"""The fault tests' trainer as a script, for the real launcher: launched.py ROOT MEMORY STEPS PAUSE."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.faults.harness import Run, _train

if __name__ == "__main__":
    root, memory, steps, pause = sys.argv[1:]
    world = int(os.environ["WORLD_SIZE"])
    run = Run(Path(root), Path(memory), steps=int(steps), world=world, pause=float(pause))
    _train(run, int(os.environ["RANK"]), "")
