"""A cell of the matrix as a script, for the real launcher: struck.py CELL [GO]

With GO the first start is a rehearsal: it trains a few steps elsewhere, so that the launcher learns what is imported,
and fails once the file GO is there. The fault then strikes the second start.
"""

import os
import pickle
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.faults.cluster import train

if __name__ == "__main__":
    cell = pickle.loads(Path(sys.argv[1]).read_bytes())
    go = [Path(name) for name in sys.argv[2:]]
    rank, start = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if go and start == 0:
        train(replace(cell, root=cell.root.with_name("rehearsal"), fault="", steps=3), rank, 0)
        deadline = time.monotonic() + 150
        while not go[0].exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        os._exit(9)
    train(cell, rank, start - len(go))
    os._exit(0)
