"""Exports that can't be: each is told clearly, and leaves nothing behind."""

from __future__ import annotations

import base64
import fcntl
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rekindle
from rekindle.cli.main import main
from rekindle.format.names import receipt_name, shard_name
from rekindle.storage.catalog import find_copies
from rekindle.storage.posix import PosixStore
from rekindle.transfer.exporting import export
from rekindle.transfer.progress import Progress
from tests import forked
from tests.transfer.helpers import FORMATS, Piece, Rank, all_of, box_of, done, named, run, taken_in, write

W = torch.arange(24.0).view(6, 4)


@pytest.fixture
def halves(root: Path, memory: Path) -> Path:
    """The directory of a checkpoint of two ranks, of which one has the left and one the right half of ``model.w``."""
    left, right = box_of("model.w", W, (0, 6), (0, 2)), box_of("model.w", W, (0, 6), (2, 4))
    return write(root, [Rank([left], named("model.w")), Rank([right, all_of("model.b", W)], named("model.b"))])


def refused(code: int, *arguments: object) -> str:
    """Runs a command that must end with this exit code. Returns its error message."""
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert "Error: " in result.stderr
    return result.stderr


@pytest.mark.parametrize("form", FORMATS)
def test_a_missing_part_is_named_before_anything_is_written(
    root: Path, memory: Path, tmp_path: Path, form: str
) -> None:
    pieces = [box_of("model.w", W, (0, 2), (0, 4)), box_of("model.w", W, (3, 6), (0, 4))]
    write(root, [Rank([piece], named("model.w")) for piece in pieces], sound=False)
    told = refused(rekindle.CorruptError.exit_code, "export", root, tmp_path / "out", "--format", form)
    assert "step 1: no shard has [2:3, 0:4] of tensor 'model.w'" in told
    assert os.listdir(tmp_path) == [root.name]

    whole = box_of("model.w", W, (0, 6), (0, 4))
    write(root, [Rank([whole], named("model.w", "model.gone"))], step=2, sound=False)
    told = refused(rekindle.CorruptError.exit_code, "export", root, 2, tmp_path / "out", "--format", form)
    assert "no shard has any of tensor 'model.gone'" in told


@pytest.mark.parametrize("form", FORMATS)
def test_damage_is_found_and_leaves_nothing(halves: Path, root: Path, tmp_path: Path, form: str) -> None:
    shard = halves / shard_name(1, 2)
    sound = shard.read_bytes()
    shard.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    told = refused(rekindle.CorruptError.exit_code, "export", root, tmp_path / "out", "--format", form)
    assert "tensor 'model.w' of step 1 differs from its checksum" in told and str(shard) in told
    assert os.listdir(tmp_path) == [root.name]

    shard.write_bytes(sound[:-1])
    assert "should have" in refused(4, "export", root, tmp_path / "out", "--format", form)
    shard.unlink()
    assert "is missing" in refused(4, "export", root, tmp_path / "out", "--format", form)
    shard.write_bytes(sound)
    receipt = halves / receipt_name(0, 2)
    receipt.write_bytes((halves / receipt_name(1, 2)).read_bytes())
    assert "is not the receipt that the manifest names" in refused(4, "export", root, tmp_path / "x", "--format", form)
    (halves / "checkpoint.json").write_text("{}")
    assert "damaged" in refused(4, "export", root, tmp_path / "x", "--format", form)
    assert os.listdir(tmp_path) == [root.name]


def test_places_that_make_no_sense(halves: Path, root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    form = ("--format", "safetensors")
    assert "no checkpoint of step 9" in refused(3, "export", root, 9, out, *form)
    assert "no checkpoint" in refused(3, "export", tmp_path / "none", out, *form)
    assert "is not a directory; make it first" in refused(3, "export", root, tmp_path / "no" / "out", *form)
    assert "has no entry 'ema' in its state: it has model" in refused(3, "export", root, out, *form, "--only", "ema")
    assert "Then OUT is missing" in refused(2, "export", root, 1, *form)
    assert "give ROOT OUT" in refused(2, "export", root, *form)
    assert "'x' is not a step" in refused(2, "export", root, "x", out, *form)
    assert "is not a size" in refused(2, "export", root, out, *form, "--max-shard-size", "much")
    torch_too = ("--format", "torch", "--max-shard-size", "1GB")
    assert "is for --format safetensors" in refused(2, "export", root, out, *torch_too)
    out.write_text("here already")
    assert "exists already" in refused(2, "export", root, out, *form)
    assert out.read_text() == "here already"
    assert set(os.listdir(tmp_path)) == {root.name, "out"}


def test_two_at_a_time_do_not_meet(halves: Path, root: Path, tmp_path: Path) -> None:
    (tmp_path / ".out.tmp").mkdir()
    (tmp_path / ".out.tmp" / "leftover").write_text("of one that was killed")
    fd = os.open(tmp_path / ".out.tmp", os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    told = refused(rekindle.BusyError.exit_code, "export", root, tmp_path / "out", "--format", "torch")
    assert "another process is writing it" in told
    os.close(fd)
    done("export", root, tmp_path / "out", "--format", "torch")
    assert set(os.listdir(tmp_path)) == {root.name, "out"}


def test_one_that_is_killed_leaves_no_name_and_no_obstacle(root: Path, memory: Path, tmp_path: Path) -> None:
    big = torch.zeros(24 << 20)
    write(root, [Rank([all_of("model.w", big)], named("model.w"))])
    process = forked.Program("rekindle", "export", root, tmp_path / "out", "--format", "dcp")
    while not (tmp_path / ".out.tmp").exists():
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait(100) == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    done("export", root, tmp_path / "out", "--format", "dcp")
    assert set(os.listdir(tmp_path)) == {root.name, "out"}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("room", [4 << 20, 9 << 20], ids=["for none", "for one of two files"])
def test_a_full_disk_is_told(
    root: Path, memory: Path, tmp_path: Path, small_tmpfs: Callable[[int], Path], form: str, room: int
) -> None:
    write(root, [Rank([all_of("model.w", torch.randn(3, 1 << 19))], named("model.w"))])
    disk = small_tmpfs(room)
    result = run("export", root, disk / "out", "--format", form)
    if form == "safetensors" and room > 7 << 20:
        assert result.exit_code == 0, result.output
        return
    assert result.exit_code == 1 and "No space left on device" in result.stderr, result.output
    assert os.listdir(disk) == []


class Counted(Progress):
    def __init__(self) -> None:
        self.total = self.done = 0
        self._lock = threading.Lock()

    def begin(self, total: int) -> None:
        self.total = total

    def advance(self, nbytes: int) -> None:
        with self._lock:
            self.done += nbytes


@pytest.mark.parametrize("form", FORMATS)
def test_progress_ends_where_it_said(halves: Path, root: Path, tmp_path: Path, form: Any) -> None:
    (copy,) = find_copies(None, PosixStore(root))
    progress = Counted()
    export(copy, tmp_path / "out", form, None, 1 << 30, progress)
    own_format = 2048 if form == "torch" else 0  # torch's file is more than the tensors' bytes
    assert 0 < progress.total <= progress.done <= progress.total + own_format


def test_pickles_go_through_unopened(root: Path, memory: Path, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "sprung"),)

    value = {"$pickle": base64.b64encode(pickle.dumps(Trap())).decode()}
    structure = {"v": {"x": {"$value": 0}, "t": {"$tensor": "v.t"}}}
    write(root, [Rank([all_of("v.t", W)], structure, [value])])
    for form in FORMATS:
        done("export", root, tmp_path / form, "--format", form)
        told = refused(2, "import", tmp_path / form, tmp_path / "back", 1)
        assert "pickle" in told and "--allow-pickle" in told
        assert not (tmp_path / "back").exists() and not (tmp_path / "sprung").exists()
    assert torch.load(tmp_path / "torch", weights_only=True)["v"]["x"] == value


def test_what_a_format_can_not_have_is_told(root: Path, memory: Path, tmp_path: Path) -> None:
    """Two places in the state with one name, to DCP; a key that no file without code can have, to torch."""
    structure = {"m": {"a.b": {"$tensor": "m.a.b"}, "a": {"b": {"$tensor": "m.a.b~"}}}}
    write(root, [Rank([all_of("m.a.b", W), all_of("m.a.b~", W + 1)], structure)])
    assert "DCP can't name its state" in refused(2, "export", root, tmp_path / "out", "--format", "dcp")
    for form in ("safetensors", "torch"):
        done("export", root, tmp_path / form, "--format", form)
        taken_in(tmp_path / form, tmp_path / f"back-{form}")
        done("export", tmp_path / f"back-{form}", tmp_path / f"{form}.pt", "--format", "torch")
        state = torch.load(tmp_path / f"{form}.pt", weights_only=True)["m"]
        assert torch.equal(state["a.b"], W) and torch.equal(state["a"]["b"], W + 1)

    structure = {"m": {"$dict": [[{"$frozenset": [1]}, {"$tensor": "m.w"}]]}}
    write(root, [Rank([all_of("m.w", W)], structure)], step=2)
    told = refused(2, "export", root, 2, tmp_path / "out", "--format", "torch")
    assert "torch.load(weights_only=True) would refuse its state" in told
    structure = {"m": {"$value": 0}}
    write(root, [Rank([], structure, [5])], step=3)
    assert "is no dictionary" in refused(2, "export", root, 3, tmp_path / "out", "--format", "dcp", "--only", "m")
    done("export", root, 3, tmp_path / "five.pt", "--format", "torch", "--only", "m")
    assert torch.load(tmp_path / "five.pt", weights_only=True) == 5


def test_what_only_memory_has_is_exported_from_there(root: Path, memory: Path, tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    checkpointer = rekindle.Checkpointer(root, {"model": model}, persist_every=1000, snapshot_every=1)
    try:
        checkpointer.step(1)
        told = done("export", root, tmp_path / "out", "--format", "torch", "--only", "model")
    finally:
        checkpointer.close()
    assert told["place"] == "memory" and told["step"] == 1
    loaded = torch.load(tmp_path / "out", weights_only=True)
    assert torch.equal(loaded["weight"], model.weight)


def test_of_several_copies_the_newest_whole_one_is_taken(root: Path, memory: Path, tmp_path: Path) -> None:
    def rank(value: float) -> list[Rank]:
        pieces: list[Piece] = [all_of("model.w", torch.full((2,), value))]
        return [Rank(pieces, named("model.w"))]

    for step in (1, 2):
        write(root, rank(float(step)), step=step)
    (root / "step-0000000003").mkdir()
    done("export", root, tmp_path / "newest", "--format", "torch")
    done("export", root, 1, tmp_path / "first", "--format", "torch")
    assert torch.load(tmp_path / "newest", weights_only=True)["model"]["w"].tolist() == [2, 2]
    assert torch.load(tmp_path / "first", weights_only=True)["model"]["w"].tolist() == [1, 1]


def test_the_commands_tell_what_they_have_done(halves: Path, root: Path, tmp_path: Path) -> None:
    out = run("export", root, tmp_path / "out", "--format", "safetensors").stdout
    assert out.startswith("step 1 from storage: 2 tensors, ") and f", 2 files: {tmp_path / 'out'}" in out
    back = run("import", tmp_path / "out", tmp_path / "back", 4).stdout
    assert back.startswith(f"step 4 of {tmp_path / 'back'}: 2 tensors, ") and back.endswith("as model\n")


def test_other_commands_need_no_torch() -> None:
    code = "import sys, rekindle.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
    assert {"export", "import"} <= main.commands.keys()


_MEASURED = """
import sys, threading, time
from pathlib import Path
from click.testing import CliRunner
import torch.distributed.checkpoint, rekindle.transfer.exporting, rekindle.transfer.importing
from rekindle.cli.main import main

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

base, peak, over = anonymous(), 0, threading.Event()
def watch():
    global peak
    while not over.wait(0.002):
        peak = max(peak, anonymous() - base)
watcher = threading.Thread(target=watch)
watcher.start()
root, out = sys.argv[1:]
for form in ("safetensors", "torch", "dcp"):
    for command in (
        ["export", root, f"{out}/{form}", "--format", form],
        ["import", f"{out}/{form}", f"{out}/back-{form}", "1", "--allow-pickle"],
    ):
        peak = 0
        done = CliRunner().invoke(main, command)
        assert done.exit_code == 0, done.output
        print(command[0], form, peak >> 20, flush=True)
over.set()
watcher.join()
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="tells by Linux's /proc")
@pytest.mark.campaign(seconds=14)
def test_memory_does_not_grow_with_the_state(root: Path, memory: Path, tmp_path: Path) -> None:
    """128 MiB, half of it in boxes of columns, go through in some MiB; of DCP's one tensor at a time, when loaded."""
    wide = torch.zeros(2048, 8192)
    left, right = box_of("model.w", wide, (0, 2048), (0, 3000)), box_of("model.w", wide, (0, 2048), (3000, 8192))
    small = [all_of(f"model.{n}", torch.zeros(1 << 20)) for n in range(16)]
    write(
        root,
        [
            Rank([left], named("model.w")),
            Rank([right, *small], named("model.w", *(piece.name for piece in small))),
        ],
    )
    del wide, left, right, small
    done_ = subprocess.run(
        [sys.executable, "-c", _MEASURED, root, tmp_path], capture_output=True, text=True, timeout=120
    )
    assert done_.returncode == 0, done_.stderr
    peaks = {tuple(line.split()[:2]): int(line.split()[2]) for line in done_.stdout.splitlines()}
    assert len(peaks) == 6
    assert max(peak for what, peak in peaks.items() if what != ("import", "dcp")) < 32, peaks
    assert peaks["import", "dcp"] < 64 + 32, peaks


@pytest.mark.campaign(seconds=9)
def test_the_newest_step_of_a_job_that_trains_fast(root: Path, memory: Path, tmp_path: Path) -> None:
    """Memory keeps a step for a few milliseconds only."""
    values = rekindle.Values(weights=torch.zeros(1000))
    ckpt = rekindle.Checkpointer(root, {"values": values}, memory=memory, persist_every=1_000_000)
    ckpt.restore()
    ckpt.step(1)
    over = threading.Event()

    def train() -> None:
        for step in range(2, 1_000_000):
            ckpt.step(step)
            if over.wait(0.002):
                return

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        command = [
            sys.executable,
            "-m",
            "rekindle",
            "export",
            str(root),
            str(tmp_path / "out"),
            "--format",
            "safetensors",
        ]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        assert made.returncode == 0 and "from memory" in made.stdout, made.stderr
    finally:
        over.set()
        trainer.join()
        ckpt.close()
