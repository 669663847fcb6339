"""The benchmark runs, checks what it saved, and leaves nothing behind."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="the benchmark reads Linux's /proc"),
]

STALL = Path(__file__).resolve().parents[1] / "bench" / "stall.py"

CONTENDERS = ["torch.save", "dcp.save", "dcp.async_save", "dcp.async_save, stager kept", "rekindle"]
WHEN = ["first", "later"]
LOADS = ["torch.load", "dcp.load", "rekindle, memory", "rekindle, storage"]


def test_stall(tmp_path: Path) -> None:
    memory, target, output = tmp_path / "memory", tmp_path / "target", tmp_path / "stall.json"
    memory.mkdir()
    options = ["--size", "16MiB", "--rounds", "1", "--saves", "2", "--compute", "0.01", "--settle", "0"]
    done = subprocess.run(
        [sys.executable, str(STALL), *options, "--dir", str(target), "--json", str(output)],
        env={**os.environ, "REKINDLE_MEMORY": str(memory)},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in [*CONTENDERS, *LOADS])

    found = json.loads(output.read_text())
    assert found["machine"].items() >= {"cores": os.cpu_count()}.items()
    for key in ("cpu", "memory_bytes", "kernel", "python", "torch", "threads", "target_file_system", "date"):
        assert found["machine"][key]
    assert str(tmp_path) not in output.read_text()

    summary = found["summary"]
    assert list(summary["saves"]) == CONTENDERS
    assert set(summary["loads"]) >= set(LOADS)
    measured = ("stall", "call", "durable", "stall_per_copy")
    figures = [saves[f"{when}_{key}"] for saves in summary["saves"].values() for key in measured for when in WHEN]
    figures += [saves["memory_peak"] for saves in summary["saves"].values()]
    figures += [value for loads in summary["loads"].values() for value in loads.values()]
    figures += summary["disk_gb_per_s"].values()
    assert all(math.isfinite(figure) and figure > 0 for figure in figures)

    for name in CONTENDERS:
        (run,) = found["raw"]["saves"][name]
        assert len(run["samples"]) == 3
        assert len({sample["fingerprint"] for sample in run["samples"]}) == 3, "the state must change between saves"
        assert 0.9 * (16 << 20) < run["state_bytes"] <= 1.01 * (16 << 20)

    assert list(memory.iterdir()) == []
    assert list(target.iterdir()) == []
