"""The benchmark's own arithmetic, the page that it rewrites, its short form, and a run that is interrupted."""

from __future__ import annotations

import ast
import graphlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integrations.environments import needs_lightning
from tests.nodes.lab import why_not

BENCH = Path(__file__).resolve().parents[1] / "bench"
PAGE = BENCH.parent / "docs" / "benchmarks.md"


@pytest.fixture(autouse=True)
def bench_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


def _module(path: Path) -> str:
    return ".".join(path.relative_to(BENCH).with_suffix("").parts)


def test_no_circle_of_imports() -> None:
    """Counts imports inside of functions, and those for types only, too."""
    names = {_module(path) for path in BENCH.rglob("*.py")}
    graph = {}
    for path in BENCH.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        imported = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        imported |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        graph[_module(path)] = imported & names
    list(graphlib.TopologicalSorter(graph).static_order())


def saves(stall: float, floor: float = 0.1, held: int = 200) -> list[dict]:
    sample = {"step_longer": stall, "durable": 1.0, "lost": stall, "call": stall, "wait": 0.0, "stall": stall}
    turn = {"state_bytes": 100, "tensors": 1, "setup": 0.0, "skipped": 0}
    memory = {"peak": held, "shared": held, "held": held}
    return [{**turn, "memory": memory, "samples": [{**sample, "floor": floor}] * 3}]


def rows(**more: object) -> dict[str, bool]:
    from summary import reach, summarize

    return {row.what: row.met for row in reach(summarize(dict(more)))}


def test_a_row_is_met_at_its_limit_and_missed_beyond() -> None:
    ours, others = saves(0.01), saves(0.51)
    assert rows(saves={"Rekindle": ours, "dcp.async_save": others})["stall, overlapped, first saves"]
    assert not rows(saves={"Rekindle": ours, "dcp.async_save": saves(0.49)})["stall, overlapped, later saves"]
    for stall, met in ((0.114, True), (0.116, False)):
        assert rows(saves={"Rekindle, overlap=False": saves(stall)})["stall, not overlapped, later saves"] is met
    for held, met in ((209, True), (211, False)):
        assert rows(saves={"Rekindle": saves(0.01, held=held)})["memory held"] is met
    for saving, met in ((1.09, True), (1.11, False)):
        pair = {"plain": 1.0, "saving": saving, "floor": 0.1}
        turn = {"pairs": [pair], "held": 1, "skipped": 0, "saves": 1}
        assert rows(loop={"Rekindle": [turn]}) == {"a snapshot at every step, drain included": met}
    for drain, met in ((1.1, True), (1.2, False)):
        turn = {"state_bytes": 1, "by": "fio", "samples": [{"drain": drain, "disk": 1.0}]}
        assert rows(drain=[turn]) == {"drain": met}


def test_the_slope_over_tensors_is_that_of_the_line() -> None:
    from summary import slope

    assert slope([(n, 0.002 + 1.5e-6 * n) for n in (10, 1_000, 100_000)]) == pytest.approx(1.5e-6)


def test_tables_go_between_the_markers_and_nothing_else_changes(tmp_path: Path) -> None:
    from report import Table, rewrite

    page = tmp_path / "page.md"
    page.write_text("a\n<!-- one -->\nold\n<!-- end -->\nb\n<!-- two -->\nkept\n<!-- end -->\nc\n")
    machine = dict.fromkeys(("cpu", "cores", "kernel", "python", "torch", "threads", "target_file_system"), "x")
    machine |= {"memory_file_system": "y", "memory_bytes": 2**30, "date": "2026-01-01T00:00:00", "peers": {}}
    document = {"machine": machine, "settings": {"command": ""}, "sizes": {}}
    table = Table("one", "", ["x", "y"], [[r"\1", "a|b"]])
    plots = [tmp_path / "img" / "one.svg", tmp_path / "img" / "one.png"]
    assert rewrite(page, document, [table, table._replace(name="three")], plots) == ["conditions", "three"]
    middle = "| x | y |\n| --- | --- |\n| \\1 | a/b |\n\n![](img/one.svg)"
    assert page.read_text() == f"a\n<!-- one -->\n\n{middle}\n\n<!-- end -->\nb\n<!-- two -->\nkept\n<!-- end -->\nc\n"


def test_the_page_has_a_place_for_every_table() -> None:
    names = set(re.findall(r"<!-- (?!end)(.+?) -->", PAGE.read_text()))
    growth = {
        "tensors 16 MiB",
        "tensors 512 MiB",
        "bytes",
        "ranks",
        "history",
        "growth",
        "reach growth",
        "skipped",
        "conditions",
    }
    assert names >= growth | {"files", "files conditions", "frameworks", "frameworks conditions"} | {
        f"{kind} 1 GiB" for kind in ("stall", "loop", "load", "disk", "reach")
    }


def test_a_moment_that_comes_early_takes_no_time_of_those_before_it() -> None:
    from launched import split

    assert split(1.0, [1.5, 1.25, 2.5]) == [0.5, 0.0, 1.0]


@pytest.mark.skipif(sys.platform != "linux", reason="the benchmark reads Linux's /proc")
@pytest.mark.campaign(40)
@pytest.mark.timeout(600)  # three starts of two ranks, and a run without faults: 25 s where nothing else runs
def test_a_job_under_faults_is_measured_and_has_the_bits_of_one_without(tmp_path: Path, memory: Path) -> None:
    command = [sys.executable, str(BENCH / "recovery.py"), "--only", "rekindle run --no-warm", "--faults", "1"]
    command += ["--rounds", "1", "--width", "32", "--settle", "0"]
    command += ["--dir", str(tmp_path / "target"), "--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, env={**os.environ, "REKINDLE_MEMORY": str(memory)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out.json").read_bytes())
    assert found["states_compared"] >= 2 * 2 * 3  # ranks, starts before a fault, steps of each
    for samples in found["samples"]["rekindle run --no-warm"].values():
        for sample in samples:
            assert sum(sample["parts"].values()) == pytest.approx(sample["seconds"])
            assert sample["parts"]["imported"] > 0 and not sample["warm"] and sample["lost"] == 0
    assert list(memory.iterdir()) == [] and list((tmp_path / "target").iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="the benchmark reads Linux's /proc")
@pytest.mark.campaign(30)
def test_saves_by_path_are_measured(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "files.py"), "--smoke"]
    command += ["--dir", str(tmp_path), "--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out.json").read_bytes())
    for turns in found["turns"].values():
        (turn,) = turns
        assert min(turn["copy"], turn["first"], *turn["next"], turn["load"]) > 0 and len(turn["next"]) == 1
        assert (turn["stored"] is None) == (turns != found["turns"]["rekindle.save"])
    assert list(found["turns"]) == ["rekindle.save", "torch.save to tmpfs", "torch.save to disk"]
    assert "first save" in done.stdout and sorted(os.listdir(tmp_path)) == ["out.json"]


@pytest.mark.skipif(sys.platform != "linux", reason="the benchmark reads Linux's /proc")
@pytest.mark.campaign(15)
def test_reads_from_another_node_are_measured(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "nodes.py"), "--smoke", "--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    turns = json.loads((tmp_path / "out.json").read_bytes())["turns"]
    assert [*turns][:3] == ["Rekindle, verified", "Rekindle, kept as a copy", "sendfile to recv_into"]
    for name, (turn,) in turns.items():
        counted = 32 << 20 if name == "iperf3" else 64 << 20  # it leaves out what its sockets hold at the end
        assert turn["bytes"] >= counted and turn["seconds"] > 0 and turn["cpu"] > 0
    assert "GB/s" in done.stdout


@pytest.mark.campaign(15)
def test_no_contender_is_faster_than_the_link_between_two_nodes(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    command = [sys.executable, str(BENCH / "nodes.py"), "--smoke", "--link", "1gbit"]
    done = subprocess.run([*command, "--json", str(tmp_path / "out.json")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out.json").read_bytes())
    assert [*found["turns"]][:2] == ["Rekindle, verified", "Rekindle, kept as a copy"]
    for (turn,) in found["turns"].values():
        assert turn["bytes"] / turn["seconds"] < 1.1 * 1e9 / 8, "4 MB may come at once after a pause"
    assert "a link of 1gbit" in found["conditions"]


@needs_lightning
@pytest.mark.skipif(sys.platform != "linux", reason="the benchmark reads Linux's /proc")
@pytest.mark.campaign(30)
def test_steps_under_a_framework_are_measured_with_its_adapter_and_without(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "frameworks.py"), "--smoke", "--only", "lightning"]
    command += ["--dir", str(tmp_path / "target"), "--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    ((pair,),) = json.loads((tmp_path / "out.json").read_bytes())["pairs"].values()
    assert pair["alone"]["snapshots"] == 0 and 5 <= pair["with"]["snapshots"] <= 15, "the default would take two"
    for turn in pair.values():
        assert len(turn["seconds"]) == 14 and min(turn["seconds"]) > 0 and turn["bytes"] > 16 << 20
    assert "Lightning, 2." in done.stdout and list((tmp_path / "target").iterdir()) == []


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="the benchmark reads Linux's /proc")
@pytest.mark.campaign(90)
@pytest.mark.timeout(900)
def test_all_of_it_in_short(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH), "--smoke", "--dir", str(tmp_path), "--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "all checks passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="the benchmark reads Linux's /proc")
@pytest.mark.campaign(11)
def test_an_interrupted_run_leaves_nothing(tmp_path: Path, memory: Path) -> None:
    target = tmp_path / "target"
    run = subprocess.Popen(
        # Where tests run in the background of a shell, SIGINT is ignored, and children would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        args=[sys.executable, str(BENCH), "--smoke", "--dir", str(target), "--json", str(tmp_path / "out.json")],
        env={**os.environ, "REKINDLE_MEMORY": str(memory)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 120
        while not (agents := list(memory.glob("*/*/rekindle-*/*/agent.json"))):  # Rekindle's turn, agent and all
            assert run.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        run.send_signal(signal.SIGINT)
        assert run.wait(60) != 0
    finally:
        run.terminate()  # which tidies up; nothing, after an end
        run.wait(60)
    assert agents and list(memory.iterdir()) == [] and list(target.iterdir()) == []
    assert not any(str(tmp_path) in line for line in _command_lines())


def _command_lines() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found
