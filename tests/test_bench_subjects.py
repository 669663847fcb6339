"""Experiments on a device whose subject does not happen: each must fail by name, and print no figure of it.

No device is needed. The processes of an experiment report what those of a broken run would, or calls that would use a
device succeed and do nothing. What runs on a CPU is run there.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

BENCH = Path(__file__).resolve().parents[1] / "bench"
TINY = {"width": 128, "layers": 1, "batch": 1, "tokens": 16, "device": "cpu"}
"""A job of 12 MB: its snapshots are made inside of step(), so that none is left out on a busy machine."""


@pytest.fixture(autouse=True)
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setenv("PYTHONPATH", str(BENCH.parent / "src"))


@pytest.fixture
def places(tmp_path: Path, memory: Path) -> Iterator[Any]:
    from on_gpu.places import Places, clear

    for path in (tmp_path / "disk", memory / "bench"):
        path.mkdir()
    made = Places(str(memory / "bench"), None, str(tmp_path / "disk"), "for a test")
    yield made
    clear(made)


def run(places: Any, work: Callable[..., object], *arguments: Any, seconds: float = 600.0, **options: Any) -> Any:
    """Runs an experiment in this process. Returns what is in its report."""
    from on_gpu.results import NotMeasured, Report, read_report

    path = Path(places.disk).parent / "report"
    path.unlink(missing_ok=True)
    report = Report(path, seconds)
    try:
        work(report, *(arguments or [places]), **options)
    except NotMeasured as error:
        report.failure(str(error))
    return read_report(path)


# -- what the processes of an experiment report -----------------------------------------------------------------


class Scripted:
    """A process that reports what a test has written for it."""

    words: dict[str, dict[str, Any]] = {}
    """By the function that the process runs."""

    def __init__(self, work: str, options: Any = None, env: Any = None) -> None:
        self.said = dict(self.words[work.partition(":")[2]])
        self.ending, self.process = "done", self
        self._ready = self.said.pop("ready", True)
        self._code, self._text = self.said.pop("code", 0), self.said.pop("text", "")
        self._killed = self.said.pop("killed", True)

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait_ready(self, limit: float) -> bool:
        return self._ready

    def go(self) -> None:
        pass

    def send_signal(self, number: int) -> None:
        assert number == signal.SIGTERM

    def listen(self, limit: float, until: str = "") -> str:
        return self.ending

    def result(self, limit: float) -> dict[str, Any]:
        return self.said

    def exit_code(self, limit: float) -> int | None:
        return self._code

    def output(self) -> str:
        return self._text

    def errors(self) -> str:
        return self._text

    def kill(self) -> float | None:
        return 0.1 if self._killed else None

    def killed(self) -> bool:
        return self._killed


SAMPLES = {"plain": [0.1, 0.1], "saved": [0.1, 0.1], "stalls": [0.01]}
TRAINED = {"raw": SAMPLES, "nbytes": 10**9, "bus": [50, 50], "until": 3, "first": 0.1, "in_memory": 0.02}
TRAINED |= {"step": 20, "steps": 16, "saves": 16, "newest": 20, "fingerprint": [1, 2]}
SAVED = {"restored": 0, "restore": 0.1, "first": 1.0, "step": 4, "both": 1.2, "waited": True, "slots": 2, "locked": 2}
GOOD: dict[str, dict[str, dict[str, Any]]] = {
    "every-step": {
        "train": TRAINED,
        "restore_training": {"seconds": 0.1, "step": 20, "source": "memory", "fingerprint": [1, 2]},
    },
    "capture": {
        "capture_beside_a_poller": {"ended": "passes", "refused": [], "queries": 9},
        "capture_beside_a_snapshot": {"saves": 3, "ended": ["passes"] * 3, "saved": [True] * 3, "failed": 0},
    },
    "exit": {"pinned_process": {}},
    "ipc": {"exporter": {"tensor": "x"}, "reader": {"reading": True}},
    "assert": {
        "assert_process": {"step": 5, "saved": 5, "code": -6, "text": "Assertion failed"},
        "restore_process": {"step": 5, "low": 5.0, "high": 5.0, "source": "memory", "seconds": 1.0},
    },
    "gasp": {
        "gasp_process": {"n": 12, "snapshot": 10, "busy": True, "queued": True, "secured": 1e9, "code": 143},
        "restore_process": {"step": 12, "low": 12.0, "high": 12.0, "source": "memory", "seconds": 1.0},
    },
    "memory-ready": {
        "floor_process": {"floor": 1.0, "huge": 64, "pieces": 64, "first_touch": 2.0},
        "saving_process": SAVED,
    },
}
"""What the processes of each experiment report where all is well."""
BROKEN = [
    ("every-step", "train", {"saves": 0}, "slower by"),
    ("every-step", "train", {"saves": 15}, "slower by"),
    ("every-step", "train", {"steps": 0, "saves": 0}, "slower by"),
    ("every-step", "train", {"newest": 19}, "snapshot, waited for"),
    ("every-step", "restore_training", {"step": 0}, "restore from memory"),
    ("every-step", "restore_training", {"source": "storage"}, "restore from memory"),
    ("every-step", "restore_training", {"fingerprint": [1, 3]}, "restore from memory"),
    ("capture", "capture_beside_a_poller", {"queries": 0}, "beside a thread"),
    ("capture", "capture_beside_a_snapshot", {"saves": 0}, "beside a snapshot"),
    ("capture", "capture_beside_a_snapshot", {"saved": [True, False, True]}, "beside a snapshot"),
    ("capture", "capture_beside_a_snapshot", {"ended": ["passes"], "saved": [True]}, "beside a snapshot"),
    ("exit", "pinned_process", {"ready": False}, "no page-locked memory"),
    ("exit", "pinned_process", {"locked": 5}, "no page-locked memory"),
    ("ipc", "reader", {"ended": "reads on", "reading": True}, "the reader"),
    ("ipc", "exporter", {"tensor": "x", "killed": False}, "the owner"),
    ("assert", "assert_process", {"saved": 4}, "rethrow 1: restored"),
    ("assert", "assert_process", {"code": 0}, "rethrow 1: the job"),
    ("assert", "assert_process", {"text": "out of memory"}, "rethrow 1: the job"),
    ("gasp", "gasp_process", {"queued": False}, "the update queued"),
    ("gasp", "gasp_process", {"busy": False}, "the update queued"),
    ("gasp", "gasp_process", {"snapshot": 12}, "the update queued"),
    ("gasp", "gasp_process", {"code": None}, "the update queued, not begun: notice until gone"),
    ("gasp", "restore_process", {"step": 0}, "the update queued"),
    ("memory-ready", "floor_process", {"floor": 0.0}, "the floor"),
    ("memory-ready", "saving_process", {"ready": False}, "a new job: first"),
    ("memory-ready", "saving_process", {"killed": False}, "a new job: first"),
    ("memory-ready", "saving_process", {"restored": 3}, "a new job: first"),
    ("memory-ready", "saving_process", {"waited": False}, "a new job: memory for two"),
    ("memory-ready", "saving_process", {"locked": 1}, "a new job: memory for two"),
]
"""Experiment, function of one of its processes, what is different there, and the figure that must not be printed."""


def scripted(monkeypatch: pytest.MonkeyPatch, places: Any, name: str, different: dict[str, dict[str, Any]]) -> Any:
    from on_gpu import endings, gasp, launches, pinning, ready, snapshots
    from on_gpu.cases import find_work
    from on_gpu.experiments import EXPERIMENTS

    monkeypatch.setattr(
        Scripted, "words", {key: {**good, **different.get(key, {})} for key, good in GOOD[name].items()}
    )
    for module in (endings, gasp, launches, pinning, ready, snapshots):
        monkeypatch.setattr(module, "Case", Scripted)
    monkeypatch.setattr(pinning, "_fitting", lambda wanted: 0)
    monkeypatch.setattr(gasp, "_PHASES", gasp._PHASES[:1])
    held = iter([{}, {4: Path("x")}, {4: Path("x")}, {4: Path("x")}])
    monkeypatch.setattr(ready, "snapshots_in_memory", lambda *_: next(held))
    monkeypatch.setattr(ready, "values", lambda *_: (4.0, 4.0))
    monkeypatch.setattr(ready, "allocated", lambda *_: [1 << 40, 1 << 40])
    experiment = next(e for e in EXPERIMENTS if e.name == name)
    options = {**experiment.options, **({"storage": False} if name == "every-step" else {})}
    # Restarts and the second of two like parts are another matter.
    seconds = {"memory-ready": 13, "assert": 600}.get(name, 600)
    return run(places, find_work(experiment.work), seconds=seconds, **options)


@pytest.mark.parametrize("name", GOOD)
def test_what_happened_is_printed(monkeypatch: pytest.MonkeyPatch, places: Any, name: str) -> None:
    found = scripted(monkeypatch, places, name, {})
    prefixes = {figure for broken, _, _, figure in BROKEN if broken == name}
    assert found.proofs and all(any(f.what.startswith(one) for f in found.figures) for one in prefixes)
    # The second start of "memory-ready" is told here that memory has what the first one left.
    assert not [one for one in found.failures if not one.startswith("a restart")]


@pytest.mark.parametrize(("name", "process", "different", "figure"), BROKEN)
def test_what_did_not_happen_is_no_figure(
    monkeypatch: pytest.MonkeyPatch, places: Any, name: str, process: str, different: dict[str, Any], figure: str
) -> None:
    found = scripted(monkeypatch, places, name, {process: different})
    assert found.failures
    assert not [f.what for f in found.figures if f.what.startswith(figure)], found.figures


# -- updates, a user's job --------------------------------------------------------------------------------------


def judged(places: Any, said: dict[str, Any], name: str = "eager", ending: str = "done") -> Any:
    from on_gpu.updates import _Found, judge

    return run(places, judge, name, _Found(said, ending, "no last words"))


def test_updates_are_judged_by_what_the_snapshots_hold(places: Any) -> None:
    right = [[n, [n, n]] for n in range(1, 8)]
    good = {"seen": right, "live": [8, 8], "messages": [], "failed": 0}
    assert judged(places, good).figures[0].met is True
    torn = judged(places, {**good, "seen": [[1, [1, 2]], *right[1:]]}).figures[0]
    assert torn.met is False and "WRONG: {1: (1, 2)}" in str(torn.value)
    refused = {**good, "seen": [[1, None], *right[1:]], "messages": ["an update that nobody announced"]}
    assert judged(places, refused, "through .data").figures[0].met is True
    assert judged(places, refused).figures[0].met is False  # an announced one must not be refused
    silent = {**refused, "messages": []}
    assert judged(places, silent, "through .data").figures[0].met is False
    unable = {**good, "seen": [], "live": [0, 0], "messages": ["Unsupported: hook"]}
    assert judged(places, unable, "compiled after, fullgraph").figures[0].met is True


@pytest.mark.parametrize(
    "different",
    [
        {"live": [7, 7]},
        {"live": [7, 8]},
        {"seen": []},
        {"seen": [[n, None] for n in range(1, 8)]},
        {"seen": [[n, [n, n]] for n in range(1, 4)]},
    ],
)
def test_updates_that_were_not_made_are_not_judged(places: Any, different: dict[str, Any]) -> None:
    good = {"seen": [[n, [n, n]] for n in range(1, 8)], "live": [8, 8], "messages": [], "failed": 0}
    found = judged(places, {**good, **different})
    assert found.failures and not found.figures
    assert judged(places, good, ending="died").failures


def test_a_gasp_is_judged_only_amid_an_update(places: Any) -> None:
    from on_gpu.updates import GASPS, _Found, judge_gasp

    def judged_gasp(held: dict[int, Any], code: int | None = 143, **different: Any) -> Any:
        said = {"live": [3, 3], "busy": True, **different}
        return run(places, judge_gasp, GASPS[0], _Found(said, "died", "", code, held))

    assert judged_gasp({}).figures[0].met and judged_gasp({4: (4.0, 4.0)}).figures[0].met
    torn = judged_gasp({3: (3.0, 4.0)}).figures[0]
    assert torn.met is False and "WRONG" in str(torn.value)
    for broken in (judged_gasp({}, busy=False), judged_gasp({}, live=[2, 2]), judged_gasp({}, code=None)):
        assert broken.failures and not broken.figures


def test_costs_need_saves_and_windows_of_both_kinds(monkeypatch: pytest.MonkeyPatch, places: Any) -> None:
    from on_gpu import user_costs

    window = {"mean": 0.1, "steps": [0.1, 0.1], "calls": [0.01, 0.01]}
    left = {"newest": 2, "saves": 2, "every": 1, "bytes": 1000}
    good = {"plain": [window] * 2, "saving": [window], "left": [left]}
    path = Path(places.disk) / "samples"
    monkeypatch.setattr(user_costs, "Case", Scripted)
    monkeypatch.setattr(Scripted, "words", {"paired_process": {"nbytes": 1000, "samples": str(path)}})

    def measured(samples: dict[str, Any]) -> Any:
        path.write_text(json.dumps(samples))
        return run(places, user_costs._measure, places, "torch.save", "torch", {})

    assert measured(good).figures[0].value == pytest.approx(1.0)
    broken = [{"left": [{**left, key: 0}]} for key in ("newest", "saves", "bytes")]
    for different in (*broken, {"plain": [window]}, {"saving": []}):
        found = measured({**good, **different})
        assert found.failures and not found.figures, different
    Scripted.words["paired_process"]["broke"] = "KeyError: 'x'"
    assert measured(good).figures[0].value == "left out: it broke: KeyError: 'x'"


def test_a_recovery_is_one_only_with_the_state_that_was(places: Any) -> None:
    from on_gpu.user_recovery import tell_recovery

    digests = {(0, 7, "a b"), (0, 8, "c d")}

    def told(**restored: Any) -> Any:
        found = {"seconds": 3.0, "parts": {}, "warm": True, "starts": 1, "lost": 1}
        found["restored"] = {0: {"step": 7, "digest": "a b", **restored}}
        return run(places, tell_recovery, "a kill", found, digests, None)

    assert told().figures[0].value == 3.0
    for broken in (told(step=0), told(step=9), told(digest="c d")):
        assert broken.failures and not broken.figures


# -- calls that succeed and do nothing --------------------------------------------------------------------------


class Idle:
    """Stands for torch on a device that takes all calls, and has done its work at once."""

    uint8 = torch.uint8
    equal, frombuffer = staticmethod(torch.equal), staticmethod(torch.frombuffer)

    def __getattr__(self, name: str) -> Any:
        def make(*arguments: Any, device: str = "", pin_memory: bool = False, **options: Any) -> Any:
            return getattr(torch, name)(*arguments, **options)

        return make

    @property
    def cuda(self) -> Any:
        return self

    def Stream(self) -> Idle:
        return self

    def Event(self, **_: Any) -> Idle:
        return self

    def stream(self, _: object) -> Any:
        return nullcontext()

    def current_stream(self) -> Idle:
        return self

    def query(self) -> bool:
        return True

    def _nothing(self, *_: Any, **__: Any) -> int:
        return 0

    record = synchronize = set_device = wait_value = attributes = device_address = _nothing


NOTHING = {
    "bus": ("copies", ""),
    "registered": ("copies", ""),
    "pageable": ("copies", "page-locked"),
    "item": ("copies", "beside"),
    "prepare": ("pinning", "populate"),
    "refused": ("pinning", ""),
    "pollers": ("launches", ""),
    "gate": ("launches", ""),
}
"""Module, and the beginning of the figures that must not be printed."""


@pytest.mark.parametrize("name", NOTHING)
def test_a_device_that_does_nothing_gives_no_figure(monkeypatch: pytest.MonkeyPatch, places: Any, name: str) -> None:
    import importlib

    from on_gpu.cases import find_work
    from on_gpu.experiments import EXPERIMENTS

    module = importlib.import_module(f"on_gpu.{NOTHING[name][0]}")
    idle = Idle()
    stand_ins = {"torch": idle, "register": idle._nothing, "unregister": idle._nothing, "populate": idle._nothing}
    stand_ins |= {"Driver": lambda: idle, "spin": idle._nothing, "GIB": 1 << 20, "MIB": 1 << 14, "_LAUNCHES": 10}
    stand_ins |= {"_fitting": lambda wanted: 1 << 20, "clear_error": idle._nothing, "_alone": idle._nothing}
    for key, value in stand_ins.items():
        if hasattr(module, key):
            monkeypatch.setattr(module, key, value)
    if name in ("bus", "registered"):
        monkeypatch.setattr(module.bus_speed, "__defaults__", (1 << 20,))
    found = run(places, find_work(next(e for e in EXPERIMENTS if e.name == name).work))
    assert any("did not happen" in one for one in found.failures)
    assert not [f.what for f in found.figures if f.what.startswith(NOTHING[name][1])]


def test_skipped_tests_of_a_device_are_none(monkeypatch: pytest.MonkeyPatch, places: Any) -> None:
    from on_gpu import suite

    text = "tests/gpu/test_cuda.py::test_x SKIPPED [100%]\n"
    done = subprocess.CompletedProcess([], 0, text, "")
    monkeypatch.setattr(suite.subprocess, "run", lambda *_, **__: done)
    found = run(places, suite.run_tests)
    assert found.failures and not found.figures
    done.stdout = text.replace("SKIPPED", "PASSED")
    assert not run(places, suite.run_tests).failures


def test_a_call_that_was_not_stuck_proves_nothing(places: Any) -> None:
    from on_gpu import stuck

    for answers in (dict.fromkeys(stuck.TRIES, stuck._FREE), dict.fromkeys(stuck.TRIES, "not begun: died")):
        found = run(places, stuck._tell, "", "item", answers)
        assert found.failures and not found.figures


# -- on a CPU, for real -----------------------------------------------------------------------------------------


def on_cpu(places: Any, name: str, **options: Any) -> Any:
    """Runs an experiment on the CPU, as the benchmark does on a device. Its limit is for a busy machine."""
    from on_gpu.experiments import EXPERIMENTS, Experiment
    from on_gpu.runner import run_one

    experiment = next(e for e in EXPERIMENTS if e.name == name)
    tried = {**vars(experiment), "options": {**experiment.options, **options}}
    return run_one(Experiment(**tried), places, 350)


@pytest.mark.timeout(420)
def test_memory_that_is_refused_is_no_first_snapshot(places: Any) -> None:
    """What the benchmark once printed was the time-out."""
    found = on_cpu(places, "first-step", size=32 << 20, device="cpu", limit=1 << 20, patience=2.0)
    assert found.status == "failed" and "a snapshot went into memory" in found.detail and not found.figures


@pytest.mark.campaign(seconds=15)
@pytest.mark.timeout(420)
def test_the_memory_of_a_job_on_the_cpu_is_measured(places: Any) -> None:
    found = on_cpu(places, "memory-ready", size=64 << 20, device="cpu")
    assert found.status == "done", found.detail
    whats = {figure.what for figure in found.figures}
    assert {"a new job: first snapshot after", "a restart: memory for two snapshots after"} <= whats


@pytest.mark.campaign(seconds=12)
@pytest.mark.timeout(420)
def test_updates_on_the_cpu_are_right(places: Any) -> None:
    found = on_cpu(places, "updates", size=24 << 20, device="cpu", cases=["optimizer in backward"])
    assert found.status == "done", found.detail
    assert [figure.met for figure in found.figures] == [True]


@pytest.mark.campaign(seconds=30)
@pytest.mark.timeout(420)
def test_a_users_job_on_the_cpu_is_measured(places: Any) -> None:
    options = {**TINY, "steps": 10, "every": 2, "rounds": 1, "ways": ["Rekindle, all defaults", "torch.save"]}
    found = on_cpu(places, "user-job", **options)
    assert found.status == "done", found.detail
    ratios = [f for f in found.figures if f.what.endswith("that of plain training")]
    assert [f.what.partition(":")[0] for f in ratios] == ["Rekindle, all defaults", "torch.save"]


@pytest.mark.campaign(seconds=30)
@pytest.mark.timeout(420)
def test_a_users_job_on_the_cpu_is_killed_and_comes_back(places: Any) -> None:
    found = on_cpu(places, "user-recovery", **TINY, every=2, kills=1, ways=["rekindle run"])
    assert found.status == "done", found.detail
    assert any("restored step" in proof and "bit for bit" in proof for proof in found.proofs)
    assert found.figures[0].what == "rekindle run: kill 1: SIGKILL to the first new step"
