"""MindSpore on the CPU, as it is published, through the stand-in for mindio_acp."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rekindle
from rekindle.agent.file_drain import FileDrainer
from rekindle.memory.files_dir import FilesDir
from rekindle.storage.path_place import is_placeholder
from tests.files.programs import KILLED
from tests.integrations.environments import environment
from tests.provide.mindio.conftest import PROVIDED
from tests.test_docs import blocks_of

TRAINING = Path(__file__).with_name("mindspore_training.py")


def mindspore(*arguments: str | Path, provided: bool = True, ends: int = 0) -> None:
    """Runs MindSpore's Python, which has no torch, with the stand-in or without it."""
    path = [str(PROVIDED / "mindio_acp"), str(Path(rekindle.__file__).parents[1])] if provided else []
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "EXPECTED_BACKEND": "mindio" if provided else "basic",
        "GLOG_v": "2",
    }
    command = [environment("mindspore"), *arguments]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=170)
    assert done.returncode == ends, done.stdout[-2000:] + done.stderr[-4000:]


_SAVE = """
import os, signal, sys
import numpy as np
import mindspore as ms
from mindspore import nn
net = nn.Dense(64, 64)
ms.save_checkpoint(nn.Dense(64, 64), sys.argv[1])
ms.save_checkpoint(net, sys.argv[1], append_dict={"step": 7})
np.save(sys.argv[2], net.weight.asnumpy())
assert "torch" not in sys.modules
os.kill(os.getpid(), signal.SIGKILL)
"""
_LOAD = """
import sys
import numpy as np
import mindspore as ms
found = ms.load_checkpoint(sys.argv[1])
assert int(found["step"].asnumpy()) == 7 and np.array_equal(found["weight"].asnumpy(), np.load(sys.argv[2]))
"""


def test_a_checkpoint_survives_a_sigkill_and_is_loaded_from_memory(
    drainer: FileDrainer, store: FilesDir, root: Path, tmp_path: Path
) -> None:
    root.mkdir()
    path, weight = root / "net.ckpt", tmp_path / "weight.npy"
    mindspore("-c", _SAVE, path, weight, ends=KILLED)
    assert is_placeholder(path.read_bytes()), "it is in memory only"
    mindspore("-c", _LOAD, path, weight)
    assert is_placeholder(path.read_bytes())
    assert drainer.tick() and os.listdir(root) == ["net.ckpt"]
    mindspore("-c", _LOAD, path, weight, provided=False)


_OTHERS = """
import sys
import numpy as np
import mindspore as ms
from mindspore import nn
net = nn.Dense(64, 64)
for way in (False, "thread", "process"):
    ms.save_checkpoint(net, f"{sys.argv[1]}/{way}.ckpt", async_save=way)
for child in __import__("multiprocessing").active_children():
    child.join()
for thread in __import__("threading").enumerate():
    if thread.name == "asyn_save_ckpt":
        thread.join()
for way in (False, "thread", "process"):
    found = ms.load_checkpoint(f"{sys.argv[1]}/{way}.ckpt")
    assert np.array_equal(found["weight"].asnumpy(), net.weight.asnumpy()), way
from mindspore.common.file_system import mindio_preload
assert mindio_preload(f"{sys.argv[1]}/process.ckpt")
import mindio_acp
assert mindio_acp.flush() == 0
"""


@pytest.mark.campaign(seconds=15)
def test_each_way_to_save_arrives(store: FilesDir, root: Path) -> None:
    """In a thread, and in a forked process, after a save of this one."""
    root.mkdir()
    mindspore("-c", _OTHERS, root)
    assert sorted(os.listdir(root)) == ["False.ckpt", "process.ckpt", "thread.ckpt"]
    assert not any(is_placeholder(path.read_bytes()) for path in root.iterdir())


@pytest.mark.campaign(seconds=30)
def test_training_goes_on_from_memory_as_if_it_had_not_been_killed(
    drainer: FileDrainer, store: FilesDir, root: Path, tmp_path: Path
) -> None:
    """With ModelCheckpoint, which keeps two. Nothing has reached storage when it is killed, nor when it goes on."""
    unbroken = tmp_path / "unbroken"
    mindspore(TRAINING, unbroken, "6", "0", provided=False)
    mindspore(TRAINING, root, "6", "4", ends=KILLED)
    assert all(is_placeholder(path.read_bytes()) for path in root.glob("*.ckpt"))
    mindspore(TRAINING, root, "6", "0")
    expected, found = np.load(unbroken / "end-0.npz"), np.load(root / "end-4.npz")
    assert sorted(expected) == sorted(found) and all(np.array_equal(expected[name], found[name]) for name in expected)
    while drainer.tick():
        pass
    names = sorted(path.name for path in root.glob("*.ckpt"))
    assert len(names) == 4, f"two of each run, and none of those that it removed: {names}"
    assert not any(is_placeholder((root / name).read_bytes()) for name in names)
    mindspore("-c", "import mindspore as ms, sys; ms.load_checkpoint(sys.argv[1])", root / names[-1], provided=False)


@pytest.mark.campaign(seconds=10)
def test_the_guide_runs(memory: Path, store: FilesDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [block.text for block in blocks_of("docs/mindspore.md") if block.language == "python" and block.runs]
    assert blocks
    monkeypatch.chdir(tmp_path)
    mindspore("-c", "\n".join(blocks))


def test_the_stand_in_is_found_as_the_guide_says() -> None:
    (block,) = (
        block.text for block in blocks_of("docs/mindspore.md") if block.language == "sh" and "export" in block.text
    )
    line = next(line for line in block.splitlines() if line.startswith("export"))
    done = subprocess.run(
        ["bash", "-c", f"{line}; echo $PYTHONPATH"],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": "before"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == f"{PROVIDED / 'mindio_acp'}:before"
