"""Experiment on calls that pass, or don't, while the device spins and the main thread is stuck in a call of its own.

Each state of the main thread has a process of its own, which is killed 8 s after the device began to spin.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

from sizes import MIB

from on_gpu.cases import Case, Speaker
from on_gpu.places import Places
from on_gpu.results import Report

__all__ = ["MAINS", "TRIES", "stuck", "stuck_process"]

MAINS = ["nothing", "synchronize", "item", "full queue", ".cpu()", "lazy load", "empty_cache"]
TRIES = ["query", "pinned copy", "cuMemcpyDtoHAsync", "Stream()", "register", "unregister"]
_COPIES = set(TRIES[:3])
_HOLDING = {".cpu()", "lazy load", "empty_cache"}
"""Calls of the main thread behind which the first three tries are expected to wait."""
_LIMIT = 8.0
"""Seconds for a process from the word to begin until it is killed."""
_PATIENCE = 0.7
"""Seconds after which a call counts as blocked."""
_SETTLE = 0.4
"""Seconds that the main thread gets to be stuck."""
_CYCLES = 2 * 10**10
"""About 10 s of the device."""
_AHEAD = 4
"""Processes that prepare while another one is measured: they take 5 to 8 s."""
_SIZE = 64 * MIB
_BLOCKED = "blocked"
_FREE = "not tried: nothing was stuck any more"


class _Cell(NamedTuple):
    main: str
    connections: str
    tries: tuple[str, ...]

    def start(self, places: Places) -> Case:
        more = {"CUDA_DEVICE_MAX_CONNECTIONS": self.connections} if self.connections else {}
        options = {"main": self.main, "tries": list(self.tries), "directory": places.memory}
        return Case("on_gpu.stuck:stuck_process", options, more)


def stuck(report: Report, places: Places) -> None:
    """Doesn't use the device itself: a context more would share its time."""
    todo = deque(_Cell(main, connections, tuple(TRIES)) for connections, main in product(("", "1"), MAINS))
    found: dict[tuple[str, str], dict[str, str]] = {(cell.connections, cell.main): {} for cell in todo}
    started: deque[tuple[_Cell, Case]] = deque()
    try:
        while todo or started:
            while todo and len(started) < _AHEAD:
                cell = todo.popleft()
                started.append((cell, cell.start(places)))
            cell, case = started.popleft()
            if report.left < _LIMIT + 2:
                case.close()
                break
            answers = _measure(case, cell.tries, report.left)
            found[cell.connections, cell.main].update(answers)
            # What comes after a blocked call may be blocked by that one: it is tried again, without it.
            blocked = [name for name in cell.tries if answers[name] == _BLOCKED]
            if len(blocked) > 1:
                todo.append(cell._replace(tries=cell.tries[cell.tries.index(blocked[0]) + 1 :]))
    finally:
        for _, case in started:
            case.close()
    for (connections, main), answers in found.items():
        _tell(report, connections, main, answers)
    report.raw(
        "answers", {f"{main}, connections {connections or 'default'}": a for (connections, main), a in found.items()}
    )


def _measure(case: Case, tries: tuple[str, ...], limit: float) -> dict[str, str]:
    """Returns, for each try, the time that it took, or what became of it."""
    answers: dict[str, str] = {}
    try:
        if not case.wait_ready(min(limit, 40.0)):
            return dict.fromkeys(tries, f"not begun: {case.errors()[-200:] or case.ending}")
        case.go()
        for word in case.words(_LIMIT):
            answers.update({name: value for name, value in word.items() if name in tries})
        missing = "no answer: the whole process stood still"
        if case.ending == "died":
            missing = f"died: {case.errors()[-200:]}"
        return {name: answers.get(name, missing) for name in tries}
    finally:
        case.close()


def _tell(report: Report, connections: str, main: str, answers: dict[str, str]) -> None:
    what = f"main thread in {main}, connections {connections or 'default'}"
    if not answers:
        report.left_out(what, "no time left")
        return
    with report.part(what):
        begun = [answer for answer in answers.values() if not answer.startswith(("not begun", "died"))]
        report.require(bool(begun) and _FREE not in begun, f"the main thread and the device were stuck: {answers}")
        _show(report, main, what, answers)


def _show(report: Report, main: str, what: str, answers: dict[str, str]) -> None:
    passed = {name for name, answer in answers.items() if answer.endswith("ms")}
    others = [f"{name} {answer}" for name, answer in answers.items() if name not in passed]
    shown = "; ".join(
        filter(None, [f"pass: {', '.join(n for n in TRIES if n in passed) or 'none'}", ", ".join(others)])
    )
    if main in _HOLDING:
        report.figure(what, shown, expected="query and copies block", met=not passed & _COPIES)
    else:
        report.figure(what, shown, expected="query and copies pass", met=passed >= _COPIES)


# -- the process ------------------------------------------------------------------------------------------------


def stuck_process(speaker: Speaker, main: str, tries: list[str], directory: str) -> None:
    import torch

    x = torch.ones(1024, device="cuda")
    hands = _Tools(directory)
    get_stuck = _ways_to_be_stuck(x)[main]
    for name in ("query", "pinned copy", "cuMemcpyDtoHAsync"):  # loads what they need
        hands.calls[name]()
    made = [_Try(hands, name) for name in tries]
    torch.cuda.synchronize()
    speaker.ready()
    hands.event.record()
    torch.cuda._sleep(_CYCLES)
    thread = threading.Thread(target=_try_all, args=(speaker, made, hands), daemon=True)
    thread.start()
    get_stuck()
    hands.stuck = False
    thread.join()


class _Tools:
    """Streams, memory and events that were made before the device got stuck, and the calls that use them."""

    def __init__(self, directory: str) -> None:
        import torch

        from on_gpu.cuda import Driver, SharedMemory, populate, register

        self._torch = torch
        self.stuck = True
        """False once the main thread has returned from the call in which it was to be stuck."""
        self.spins = False
        """True if the device was still spinning at the last query."""
        self.driver = Driver()
        self.streams = [torch.cuda.Stream() for _ in range(2)]
        self.event, self.copied = torch.cuda.Event(), torch.cuda.Event()
        self.event.record()
        self.source = torch.ones(_SIZE, dtype=torch.uint8, device="cuda")
        self.locked, self.other, self.plain = (SharedMemory(directory, _SIZE) for _ in range(3))
        for memory in (self.locked, self.other, self.plain):
            populate(memory, 1)
        for memory in (self.locked, self.other):
            if code := register(memory.address, _SIZE):
                raise RuntimeError(f"page-lock: error {code}")
        self.calls: dict[str, Callable[[], object]] = {
            "query": self._query,
            "pinned copy": self._copy,
            "cuMemcpyDtoHAsync": self._driver_copy,
            "Stream()": lambda: torch.cuda.Stream(),
            "register": lambda: _check(register(self.plain.address, _SIZE)),
            "unregister": self._unregister,
        }

    def _query(self) -> None:
        self.spins = not self.event.query()

    def _copy(self) -> None:
        torch = self._torch
        with torch.cuda.stream(self.streams[0]):
            self.locked.bytes.copy_(self.source, non_blocking=True)
            self.copied.record()
        while not self.copied.query():
            time.sleep(1e-3)

    def _driver_copy(self) -> None:
        stream = self.streams[1]
        _check(self.driver.copy_to_host(self.locked.address, self.source.data_ptr(), _SIZE, stream))
        while not self.driver.has_ended(stream):
            time.sleep(1e-3)

    def _unregister(self) -> None:
        from on_gpu.cuda import unregister

        _check(unregister(self.other.address))


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"error {code}")


def _ways_to_be_stuck(x: Any) -> dict[str, Callable[[], object]]:
    import torch

    big = torch.ones(_SIZE, dtype=torch.uint8, device="cuda")

    def full_queue() -> None:
        for _ in range(5000):
            x.add_(1)

    def empty_cache() -> None:
        cached = torch.empty(_SIZE, dtype=torch.uint8, device="cuda")
        del cached
        torch.cuda.empty_cache()

    torch.empty(2 * _SIZE, dtype=torch.uint8, device="cuda")  # given back at once: there is something to be freed
    x.add_(1)
    float(x.sum().item())
    return {
        "nothing": lambda: time.sleep(_LIMIT),
        "synchronize": torch.cuda.synchronize,
        "item": lambda: x[0].item(),
        "full queue": full_queue,
        ".cpu()": big.cpu,
        "lazy load": lambda: torch.nn.functional.softshrink(x),  # a kernel that nothing has used yet
        "empty_cache": empty_cache,
    }


class _Try:
    """One call, in a thread of its own that has entered the device before that got stuck."""

    def __init__(self, hands: _Tools, name: str) -> None:
        self.name = name
        self._hands, self._answer = hands, ""
        self._entered, self._begin = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._entered.wait()

    def answer(self) -> str:
        """Make the call now. Returns the time that it took, or what became of it."""
        self._begin.set()
        self._thread.join(_PATIENCE)
        return self._answer or _BLOCKED

    def _run(self) -> None:
        import torch

        torch.cuda.set_device(0)
        self._hands.driver.adopt()
        self._entered.set()
        self._begin.wait()
        began = time.perf_counter()
        try:
            self._hands.calls[self.name]()
        except Exception as error:
            self._answer = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            return
        self._answer = f"{(time.perf_counter() - began) * 1e3:.1f} ms"


def _try_all(speaker: Speaker, tries: list[_Try], hands: _Tools) -> None:
    time.sleep(_SETTLE)
    for one in tries:
        answer = one.answer()
        # What passes proves nothing unless the main thread is still in its call, and the device still spins.
        held = hands.stuck and (one.name != "query" or answer == _BLOCKED or hands.spins)
        speaker.say(**{one.name: answer if held else _FREE})
    speaker.done()
