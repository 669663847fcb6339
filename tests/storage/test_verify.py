"""One flipped byte, wherever it is: found, named, and never a reason to lose what is sound."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import rekindle
from rekindle.cli.main import main
from rekindle.format.files import Directory
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.format.names import MANIFEST, receipt_name, shard_name, step_dir
from rekindle.format.receipt import Receipt
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.memory.slots import Slots
from rekindle.restore.restore import restore
from rekindle.session.group import SingleProcess
from rekindle.storage.catalog import find_copies
from rekindle.storage.posix import PosixStore
from rekindle.storage.verify import verify
from tests.conftest import commit, make_shard
from tests.interleave import before_call

FIRST = Incarnation(1, "a" * 16)
DATA = {"weight": b"w" * 1000, "bias": b"b" * 10, "empty": b""}


@pytest.fixture
def store(root: Path) -> PosixStore:
    """Steps 1 and 2, of two ranks."""
    store = PosixStore(root)
    for step in (1, 2):
        for rank in (0, 1):
            receipt, data = make_shard(ShardId(step, rank, 2, FIRST), DATA)
            store.write_shard(receipt, memoryview(data), lambda nbytes: None)
        assert store.publish(receipt.stamp)
    return store


def flip(path: Path, at: int, mask: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= mask
    path.write_bytes(data)


def flips(path: Path) -> Iterator[str]:
    """Damages a receipt or manifest, one byte after the other: all of its head, and samples of the rest."""
    sound = path.read_bytes()
    head = sound.index(b'"format"')
    for at in [*range(head), *range(head, len(sound), 40)]:
        for mask in (1, 8):
            flip(path, at, mask)
            yield f"byte {at}: {sound[max(at - 12, 0) : at + 1].decode()} -> {chr(sound[at] ^ mask)}"
            path.write_bytes(sound)


def report(wrong: dict[str, str]) -> str:
    return f"{len(wrong)} flips:\n" + "\n".join(f"{where}: {what[:120]}" for where, what in list(wrong.items())[:8])


def problems(store: PosixStore, step: int = 2) -> list[str]:
    return [str(error) for copy in find_copies(None, store) if copy.step == step for error in verify(copy)]


def place(store: PosixStore, tensor: str) -> int:
    """Position of a tensor's first byte in rank 1's shard."""
    path = store.root / step_dir(2) / receipt_name(1, 2)
    receipt = Receipt.decode(path.read_bytes(), path)
    return receipt.header_bytes + next(c.start for c in receipt.layout.chunks if c.name == tensor)


def test_a_sound_checkpoint_has_no_problems(store):
    counted: list[int] = []
    for copy in find_copies(None, store):
        assert verify(copy, counted.append) == []
    assert sum(counted) == sum(path.stat().st_size for path in store.root.rglob("*.safetensors"))


@pytest.mark.parametrize("tensor", ["v.weight", "v.bias"])
def test_a_flipped_byte_of_a_tensor(store, tensor):
    flip(store.root / step_dir(2) / shard_name(1, 2), place(store, tensor) + 5)
    (problem,) = problems(store)
    for part in (step_dir(2), shard_name(1, 2), repr(tensor), "step 2"):
        assert part in problem
    assert problems(store, 1) == []


def test_a_flipped_byte_of_the_header(store):
    flip(store.root / step_dir(2) / shard_name(0, 2), 20)
    (problem,) = problems(store)
    for part in (step_dir(2), shard_name(0, 2), "header", "step 2"):
        assert part in problem


def test_a_flipped_byte_of_a_receipt(store):
    path = store.root / step_dir(2) / receipt_name(1, 2)
    flip(path, path.stat().st_size // 2)
    found = problems(store)
    assert found and all(str(path) in problem for problem in found)


def test_a_receipt_that_is_sound_but_not_the_manifests(store):
    path = store.root / step_dir(2) / receipt_name(1, 2)
    other, _ = make_shard(ShardId(2, 1, 2, FIRST, persist=False), DATA)
    path.write_bytes(other.raw)
    (problem,) = problems(store)
    assert str(path) in problem and "manifest" in problem


def test_another_checkpoints_shard_with_its_receipt(store):
    for name in (receipt_name(1, 2), shard_name(1, 2)):
        shutil.copy(store.root / step_dir(1) / name, store.root / step_dir(2) / name)
    assert any("belongs to another checkpoint" in problem for problem in problems(store))


@pytest.mark.campaign(seconds=9)
def test_every_flipped_byte_of_a_manifest_is_reported_by_the_command_line(store, memory):
    """Also where the checkpoint can't be recognised by its stamp any more: it must not just vanish."""
    command = ["verify", str(store.root), "--json"]
    assert CliRunner().invoke(main, command).exit_code == 0
    path = store.root / step_dir(2) / MANIFEST
    silent = {}
    for where in flips(path):
        result = CliRunner().invoke(main, command)
        if result.exit_code != rekindle.CorruptError.exit_code or str(path) not in result.output:
            silent[where] = f"exit code {result.exit_code}"
    assert not silent, report(silent)


@pytest.mark.parametrize("name", [shard_name(0, 2), shard_name(1, 2), receipt_name(0, 2)])
def test_a_missing_file(store, name):
    (store.root / step_dir(2) / name).unlink()
    found = problems(store)
    assert found and all(step_dir(2) in problem and name in problem for problem in found)


@pytest.mark.parametrize("length", [0, 5000, -1])
def test_a_truncated_shard(store, length):
    path = store.root / step_dir(2) / shard_name(1, 2)
    path.write_bytes(path.read_bytes()[:length])
    (problem,) = problems(store)
    assert str(path) in problem


def test_several_problems_are_all_reported(store):
    flip(store.root / step_dir(2) / shard_name(0, 2), 20)
    flip(store.root / step_dir(2) / shard_name(1, 2), place(store, "v.weight"))
    flip(store.root / step_dir(2) / shard_name(1, 2), place(store, "v.bias"))
    assert len(problems(store)) == 3


@pytest.mark.parametrize("read", range(2))
def test_what_a_later_start_saves_anew_while_it_is_read_is_not_damaged_and_is_verified(
    store, memory, monkeypatch, read
):
    later = Incarnation(2, "b" * 16, FIRST.id, 1)

    def save_again() -> None:
        for rank in (0, 1):
            receipt, data = make_shard(ShardId(2, rank, 2, later), DATA)
            store.write_shard(receipt, memoryview(data), lambda nbytes: None)
        assert store.publish(receipt.stamp)

    met = before_call(read, Directory, ["shard"], save_again, monkeypatch)
    result = CliRunner().invoke(main, ["verify", str(store.root), "2", "--json"])
    assert met() and result.exit_code == 0, result.output
    verdicts = {entry["generation"]: entry["verdict"] for entry in json.loads(result.stdout)}
    assert verdicts[2] == "sound" and verdicts[1] in ("sound", "gone: a newer step has taken its place")


# -- what damage must not do to the rest -----------------------------------------------------------------------------


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """A thousand restores would log some thousand lines."""
    caplog.set_level(logging.CRITICAL, "rekindle")


def load(job: JobDir | None, store: PosixStore) -> str:
    """Restores, and checks what was restored byte for byte. Returns the outcome in words."""
    values = rekindle.Values()
    try:
        done, _ = restore(SingleProcess(), {"v": values}, job, store, None, allow_pickle=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if done is None:
        return "nothing to restore"
    assert {name: bytes(tensor.numpy()) for name, tensor in values.state_dict().items()} == DATA
    return f"step {done.step}"


def test_a_flipped_byte_of_a_tensor_makes_a_restore_take_the_older_step(store):
    assert load(None, store) == "step 2"
    flip(store.root / step_dir(2) / shard_name(0, 2), place(store, "v.weight"))
    assert load(None, store) == "step 1"


def test_a_flipped_byte_of_a_receipt_makes_a_restore_take_the_older_step(store, quiet):
    wrong = {}
    for where in flips(store.root / step_dir(2) / receipt_name(0, 2)):
        if (came := load(None, store)) != "step 1":
            wrong[where] = came
    assert not wrong, report(wrong)


def test_no_flipped_byte_of_a_manifest_keeps_an_older_step_from_being_restored(store, quiet):
    wrong = {}
    for where in flips(store.root / step_dir(2) / MANIFEST):
        if (came := load(None, store)) != "step 1":
            wrong[where] = came
    assert not wrong, report(wrong)


def test_no_flipped_byte_of_a_manifest_makes_retention_remove_a_sound_checkpoint(store):
    backup = store.root.with_name("backup")
    shutil.copytree(store.root / step_dir(1), backup)
    newest = store.root.with_name("newest")
    shutil.copytree(store.root / step_dir(2), newest)
    lost = {}
    for where in flips(store.root / step_dir(2) / MANIFEST):
        store.prune(2, None)
        store.clean_up()
        if store.find(1) is None:
            lost[where] = "step 1 is gone"
            shutil.copytree(backup, store.root / step_dir(1), dirs_exist_ok=True)
        if len(list((store.root / step_dir(2)).glob("*"))) < 5:
            shutil.copytree(newest, store.root / step_dir(2), dirs_exist_ok=True)
    assert not lost, report(lost)


def test_a_checkpoint_with_a_damaged_manifest_is_not_thrown_away_with_the_litter(store):
    """Its shards may be all that is left of that step; a person decides."""
    before = {path.name for path in (store.root / step_dir(2)).iterdir()}
    flip(store.root / step_dir(2) / MANIFEST, 0)
    store.clean_up()
    assert {path.name for path in (store.root / step_dir(2)).iterdir()} == before


def test_no_flipped_byte_of_a_receipt_in_memory_keeps_an_older_step_from_being_restored(memory, root, quiet):
    job = JobDir.of(root, memory_base())
    job.create()
    slots = Slots(job, 0, 1, [0])
    for step in (1, 2):
        commit(slots, *make_shard(ShardId(step, 0, 1, FIRST), DATA))
    assert load(job, PosixStore(root)) == "step 2"
    wrong = {}
    for where in flips(job.path / step_dir(2) / receipt_name(0, 1)):
        if (came := load(job, PosixStore(root))) != "step 1":
            wrong[where] = came
    slots.close()
    assert not wrong, report(wrong)
