"""No power cut loses, tears or litters anything; and where one would, this is what would tell."""

from __future__ import annotations

import ast
import itertools
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import rekindle
from rekindle.format.lineage import ShardId
from rekindle.format.metric import Metric
from rekindle.format.names import step_dir
from rekindle.storage import disk as calls
from rekindle.storage.posix import PosixStore
from rekindle.storage.removal import read_stamp_in
from tests.conftest import make_shard
from tests.crash.disk import Data, Disk, Effort, Entry, Node, Sync
from tests.crash.explore import QUICK, Explorer, Step
from tests.crash.histories import MEETINGS, calls_of, do, explorer_in, scratch, work
from tests.crash.jobs import OPERATIONS, Run, content_of, race
from tests.crash.judge import Promise, look
from tests.crash.recorder import Recorder

PACKAGE = Path(rekindle.__file__).parent


@pytest.fixture
def place() -> Iterator[Path]:
    logging.disable(logging.CRITICAL)  # drains that die say so
    with scratch() as path:
        yield path
    logging.disable(logging.NOTSET)


@pytest.fixture
def explorer(place: Path) -> Explorer:
    return explorer_in(place)


def assert_nothing_wrong(explorer: Explorer) -> None:
    shown = "\n\n".join(map(str, explorer.violations[:3]))
    assert not explorer.violations, f"{len(explorer.violations)} violations, the first of which are\n{shown}"


# -- the product -----------------------------------------------------------------------------------------------------


@pytest.mark.timeout(600)
def test_every_operation_and_some_sequences_of_two(explorer: Explorer) -> None:
    """Each operation alone; of two, every tenth sequence, among which each operation comes first and second."""
    plain = [one for one in work("quick", {}) if one[2] is None]
    pairs = [one for one in plain if len(one[1]) == 2][::10]
    assert {one[1][0] for one in pairs} >= {one[1][0] for one in plain if one[1][-1][0] != "export"}
    for one in [one for one in plain if len(one[1]) == 1] + pairs:
        do(explorer, "quick", one)
    assert_nothing_wrong(explorer)
    assert explorer.counts["states"] > 300 and explorer.counts["second states"] > 50


@pytest.mark.timeout(600)
@pytest.mark.campaign(seconds=45)
def test_every_sequence_of_two_operations(explorer: Explorer) -> None:
    for one in work("quick", {}):
        if one[2] is None:
            do(explorer, "quick", one)
    assert_nothing_wrong(explorer)
    assert explorer.counts["histories"] == 12 + 12 * 12 - 12
    assert explorer.counts["states"] > 1000 and explorer.counts["second states"] > 300


@pytest.mark.timeout(600)
@pytest.mark.parametrize("every", [36, pytest.param(1, marks=pytest.mark.campaign(seconds=60))])
def test_a_process_that_is_killed_before_the_power_goes(every: int, explorer: Explorer, place: Path) -> None:
    """Each history takes as long as ten without a kill: a change looks at some, a campaign at all of the command's."""
    plain = work("quick", {})
    killed = [one for one in work("quick", calls_of(place / "calls")) if one not in plain]
    for one in killed[::every]:
        do(explorer, "quick", one)
    assert_nothing_wrong(explorer)
    assert explorer.counts["states"] > 100


@pytest.mark.campaign(seconds=20)
def test_two_nodes_that_publish_at_once(explorer: Explorer) -> None:
    for one in work("quick", {}):
        if one[2] is not None:
            do(explorer, "quick", one)
    assert_nothing_wrong(explorer)
    assert explorer.counts["states"] > 100
    run, _ = explorer.record([("save", None)], race(MEETINGS))
    assert run.recorder.calls == MEETINGS, "else some moment has been left out"


@pytest.mark.parametrize("broken", [False, True])
def test_no_checkpoint_comes_back_without_its_pin(explorer: Explorer, broken: bool) -> None:
    def pinned_save(run: Run) -> None:
        receipt, data = make_shard(ShardId(1, 0, 1, run.incarnation, pinned=True), {"x": b"x" * 5000})
        run.store.write_shard(receipt, memoryview(data), lambda nbytes: None)
        assert run.store.publish(ShardId(1, 0, 1, run.incarnation))
        run.store.clean_up()

    if broken:
        explorer.mutate = without("sync", lambda path: path.name.endswith(".partial"))
    run, first = explorer.record([], pinned_save)
    published = lacking = 0
    for tree, *_ in explorer._states(run.recorder, first, Promise(), QUICK):
        explorer.place.put(tree)
        for entry in run.store.published():
            published += 1
            lacking += not entry.pinned
    assert published > 5 and (lacking > 0) is broken


CHANGES: dict[str, Callable[[PosixStore, ShardId], None]] = {
    "pin": PosixStore.pin,
    "metric": lambda store, stamp: store.note_metric(stamp, Metric("loss", 0.5, "min")),
}


@pytest.mark.parametrize(
    ("change", "unsynced"), [("pin", None), ("pin", "sync"), ("metric", None), ("metric", "sync"), ("metric", "fsync")]
)
def test_a_change_of_a_checkpoint_costs_nothing_and_stays(
    explorer: Explorer, change: str, unsynced: str | None
) -> None:
    """The checkpoint is offered and whole at any moment of it, and as it was told to be afterwards."""

    def change_it(run: Run) -> None:
        if unsynced is not None:
            without(unsynced)(run.recorder)
        CHANGES[change](run.store, ShardId(1, 0, 1, run.incarnation))
        run.recorder.tell("changed", f"{change} is told to be there")

    run, first = explorer.record([("save", None)], change_it)
    wrong, states = list[str](), Counter[bool]()
    for tree, *_, promise in explorer._states(run.recorder, first, Promise(), QUICK):
        explorer.place.put(tree)
        wrong += look(explorer.place.root, promise, run.known)
        is_changed = any(entry.pinned or entry.stamp.metric for entry in run.store.published())
        wrong += ["told, and gone"] if "changed" in promise.exported and not is_changed else []
        states[is_changed] += 1
    assert bool(wrong) is (unsynced is not None), wrong[:3]
    assert states[True] and states[False]


# -- would it tell? --------------------------------------------------------------------------------------------------

Mutation = Callable[[Recorder], None]


def without(call: str, such: Callable[[Path], bool] = lambda path: True) -> Mutation:
    """The product without some of its syncs: they are not made, and the disk never hears of them."""

    def mutate(recorder: Recorder) -> None:
        made = getattr(calls, call)

        def skip(what: object) -> None:
            path = what if isinstance(what, Path) else Path(os.readlink(f"/proc/self/fd/{what}"))
            if not such(path):
                made(what)

        setattr(calls, call, skip)

    return mutate


def is_shard(path: Path) -> bool:
    return ".safetensors" in path.name


def is_document(path: Path) -> bool:
    return ".json" in path.name or (".tmp" in path.name and not is_shard(path))


def is_root(path: Path) -> bool:
    return path.name == "run"


def is_above(path: Path) -> bool:
    return path.name in ("jobs", "disk")


def is_step(path: Path) -> bool:
    return path.name.startswith("step-")


BROKEN: dict[str, tuple[Mutation, tuple[Step, ...], str]] = {
    "shards are not synced": (without("fsync", is_shard), (("save", None),), "torn"),
    "documents are not synced": (without("fsync", is_document), (("save", None),), "can't be read"),
    "names in a step are not synced": (without("sync", is_step), (("save", None), ("save", None)), "is lost"),
    "names in the root are not synced": (without("sync", is_root), (("save", None),), "is lost"),
    "names above the root are not synced": (without("sync", is_above), (("save", None),), "is lost"),
    "an export's files are not synced": (
        without("sync", lambda path: path.suffix in (".safetensors", ".json")),
        (("save", None), ("export", None)),
        "out-0 is there and torn",
    ),
    "an export's name is not synced": (
        without("sync", lambda path: path.name == "disk"),
        (("save", None), ("export", None)),
        "out-0, told to be exported, is lost",
    ),
}


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[pytest.mark.campaign(seconds=9)] * ("export" in what)) for what in BROKEN]
)
def test_a_missing_sync_is_found_and_the_state_is_named(place: Path, what: str) -> None:
    mutate, steps, wrong = BROKEN[what]
    explorer = Explorer(place, mutate=mutate, wanted=wrong)
    explorer.explore(steps)
    found = [violation for violation in explorer.violations if wrong in violation.wrong]
    assert found, [str(violation) for violation in explorer.violations[:3]]
    text = str(found[0])
    assert "history: save" in text and "power cut: after" in text and "lost:" in text


def test_a_manifest_before_its_shards_is_found(place: Path) -> None:
    """The renames come in another order: the manifest's first, the shards' last."""

    def mutate(recorder: Recorder) -> None:
        made, waiting = calls.rename, list[tuple[Path, Path]]()

        def rename(path: Path, to: Path) -> None:
            if is_shard(to):
                os.link(path, to)  # so that the product finds it; the disk hears of it later
                waiting.append((path, to))
                return
            if to.name == "checkpoint.json":
                made(path, to)
                calls.sync(to.parent)
                while waiting:
                    shard, name = waiting.pop()
                    name.unlink()
                    made(shard, name)
                return
            made(path, to)

        calls.rename = rename

    explorer = Explorer(place, mutate=mutate, wanted="offered and torn")
    explorer.explore([("save", None)])
    assert any("offered and torn" in violation.wrong for violation in explorer.violations)


@pytest.mark.campaign(seconds=8)
def test_trusting_a_manifest_that_can_be_seen_is_found(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as nobody had synced it, it was none; two nodes and a power cut at the wrong moment lost everything."""

    def seen(store: PosixStore, stamp: ShardId) -> bool:
        found = [read_stamp_in(path) for path in (store._partial(stamp), store.root / step_dir(stamp.step))]
        return any(one is not None and one.checkpoint == stamp.checkpoint for one in found)

    monkeypatch.setattr(PosixStore, "_sync_published", seen)
    explorer = Explorer(place, wanted="is lost")
    for at in range(MEETINGS):
        explorer.explore([("save", None)], race(at))
    assert any("is lost" in violation.wrong for violation in explorer.violations)


# -- the model -------------------------------------------------------------------------------------------------------


def disk_with_file() -> tuple[Disk, Node, Node]:
    root, file = Node(True), Node(False, what="f")
    disk = Disk.settled(root)
    disk.apply(Entry(((root, "f", file),), "create f"))
    return disk, root, file


def states(disk: Disk, effort: Effort = QUICK) -> set[frozenset[tuple[str, bytes | None]]]:
    return {frozenset(tree.items()) for tree, _ in disk.states(effort)}


def test_a_synced_file_in_an_unsynced_directory_may_be_gone_and_never_torn() -> None:
    disk, root, file = disk_with_file()
    disk.apply(Data(file, 0, b"x" * 5000, "write"))
    disk.apply(Sync(file, "fsync"))
    whole = frozenset({("f", b"x" * 5000)})
    assert states(disk) == {frozenset(), whole}
    disk.apply(Sync(root, "fsync"))
    assert states(disk) == {whole}


def test_an_unsynced_file_may_be_empty_zeros_torn_or_somebody_elses() -> None:
    disk, root, file = disk_with_file()
    disk.apply(Sync(root, "fsync"))
    disk.apply(Data(file, 8192, None, "allocate"))
    disk.apply(Data(file, 0, b"x" * 8192, "write"))
    found = {dict(state)["f"] for state in states(disk)}
    assert {b"", bytes(8192), b"x" * 8192, b"x" * 4096 + bytes(4096), bytes(4096) + b"x" * 4096} <= found
    assert b"x" * 2048 + bytes(6144) in found, "torn within a block"
    assert any(content and content.strip(b"x") and b"\0" not in content for content in found)


def test_renames_are_whole_and_come_in_any_order() -> None:
    root, old, new = Node(True), Node(False), Node(False)
    root.names["a"], root.names["b"] = old, new
    old.data, new.data = bytearray(b"old"), bytearray(b"new")
    disk = Disk.settled(root)
    disk.apply(Entry(((root, "a", None), (root, "aside", old)), "rename a to aside"))
    disk.apply(Entry(((root, "b", None), (root, "a", new)), "rename b to a"))
    assert states(disk) == {
        frozenset({("a", b"old"), ("b", b"new")}),
        frozenset({("aside", b"old"), ("b", b"new")}),
        frozenset({("aside", b"old"), ("a", b"new")}),
        frozenset({("a", b"new")}),
    }


def test_a_file_that_moves_to_another_directory_may_be_in_both_or_in_none() -> None:
    root, here, there, file = Node(True), Node(True), Node(True), Node(False)
    root.names, here.names = {"here": here, "there": there}, {"f": file}
    disk = Disk.settled(root)
    disk.apply(Entry(((there, "f", file),), "rename"))
    disk.apply(Entry(((here, "f", None),), "rename"))
    found = {frozenset(path for path, content in state if content is not None) for state in states(disk)}
    assert found == {frozenset(some) for n in range(3) for some in itertools.combinations(["here/f", "there/f"], n)}


# -- the recorder ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*OPERATIONS])
def test_the_record_of_an_operation_ends_with_what_is_on_the_disk(explorer: Explorer, name: str) -> None:
    run, _ = explorer.record([("save", None), (name, None)])
    disk = run.recorder.start
    for op in run.recorder.log:
        disk.apply(op)
    assert content_of(run.place.world) in [tree for tree, _ in disk.states(QUICK)]


def test_nothing_that_changes_a_disk_goes_past_the_table() -> None:
    """But for files without a name, the memory store's, and what torch writes by itself."""
    forbidden = {"rename", "replace", "unlink", "remove", "rmdir", "mkdir", "makedirs", "fsync", "pwrite", "truncate"}
    forbidden |= {"write_bytes", "write_text", "rmtree", "link", "symlink", "touch", "posix_fallocate", "ftruncate"}
    storage = [PACKAGE / "storage" / name for name in ("posix.py", "direct_io.py", "copy.py", "private.py")]
    for path in [*storage, *PACKAGE.glob("transfer/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in forbidden:
                owner = node.func.value
                by_table = isinstance(owner, ast.Name) and owner.id == "disk"
                is_text = node.func.attr == "replace" and not (isinstance(owner, ast.Name) and owner.id == "os")
                assert by_table or is_text, f"{path.name}:{node.lineno} {node.func.attr}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
                modes = [arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant)]
                assert modes in (["rb"], ["r"]), f"{path.name}:{node.lineno} opens for writing"
