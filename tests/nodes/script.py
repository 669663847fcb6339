"""A rank of a task as a script, for the real launcher: script.py TASK"""

import os
import pickle
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.nodes.train import train

if __name__ == "__main__":
    train(pickle.loads(Path(sys.argv[1]).read_bytes()), int(os.environ["RANK"]))
    os._exit(0)
