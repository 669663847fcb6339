"""Real Prometheus scrapes a job through a SIGKILL and a drill: its values are the records', alerts come and go."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

from rekindle.cli.goodput import add_up
from rekindle.cli.incidents import find_incidents
from rekindle.memory.costs import BOUNDS, Costs, rank_costs
from rekindle.memory.job_dir import JobDir, memory_base
from tests.cli.test_metrics import MONITORING, serve
from tests.faults.harness import wait_for

pytestmark = [
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="there is no Prometheus"),
    pytest.mark.campaign(seconds=40),
    pytest.mark.timeout(420),
]

_OLD = 15
"""Seconds after which a checkpoint on storage is too old. A drain takes a second at most, on a busy machine, too."""
_DRILL = {"RekindleNoAgent", "RekindleNothingDurable", "RekindleStorageRefuses"}
_TRAINER = """
    import hashlib, os, sys, time
    import torch, rekindle

    root, hold, until = sys.argv[1:]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 32))
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt = rekindle.Checkpointer(root, {"model": model, "optimizer": optimizer}, persist_seconds=0)
    step = ckpt.restore()
    with ckpt.guard():
        while not os.path.exists(until) or step < int(open(until).read()):
            with ckpt.pause_watchdog("held"):
                while os.path.exists(hold):
                    time.sleep(0.01)
            optimizer.zero_grad()
            model(torch.randn(4, 32)).square().mean().backward()
            optimizer.step()
            step += 1
            ckpt.step(step)
            time.sleep(0.01)
    state = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    print(hashlib.sha256(state).hexdigest(), flush=True)
    ckpt.close()
"""


class Trainer:
    """One rank that trains until it is held, killed, or told the last step."""

    def __init__(self, root: Path) -> None:
        self._hold, self._until = root.with_name(f"{root.name}.hold"), root.with_name(f"{root.name}.until")
        command = [sys.executable, "-c", textwrap.dedent(_TRAINER), str(root), str(self._hold), str(self._until)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    @contextmanager
    def held(self) -> Iterator[None]:
        self._hold.touch()
        yield
        self._hold.unlink()

    def finish(self, step: int) -> str:
        """Digest of the weights of that step."""
        self._until.write_text(str(step))
        told, _ = self.process.communicate(timeout=120)
        assert self.process.returncode == 0
        return told.strip()


class Prometheus:
    """A server that scrapes four times a second, by the rules of the examples with short times."""

    def __init__(self, place: Path, target: str) -> None:
        rules = (MONITORING / "rekindle.rules.yml").read_text()
        rules, waits = re.subn(r"for: \d+m", "for: 1s", rules)
        rules, ages = re.subn(r"> 1800", f"> {_OLD}", rules)
        assert waits >= 5 and ages == 1
        (place / "rekindle.rules.yml").write_text(rules)
        config = (MONITORING / "prometheus.yml").read_text()
        config = config.replace("127.0.0.1:9760", target).replace("15s", "250ms")
        (place / "prometheus.yml").write_text(config)
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self._url = f"http://{address}/api/v1"
        command = ["prometheus", f"--config.file={place}/prometheus.yml", f"--web.listen-address={address}"]
        with open(place / "prometheus.log", "wb") as log:
            self.process = subprocess.Popen([*command, f"--storage.tsdb.path={place}/data"], stderr=log)

    def _get(self, path: str, **query: str) -> Any:
        with suppress(OSError), urlopen(f"{self._url}/{path}?{urlencode(query)}", timeout=30) as answer:
            return json.load(answer)["data"]
        return {}

    def values(self, query: str) -> dict[str, float]:
        """Values of a query, by the label that tells them apart, or by nothing."""
        found = {}
        for one in self._get("query", query=query).get("result", []):
            labels = {"le", "part", "cause", "kind", "place"} & one["metric"].keys()
            found["".join(one["metric"][label] for label in labels)] = float(one["value"][1])
        return found

    def value(self, query: str) -> float | None:
        return self.values(query).get("")

    def firing(self) -> set[str]:
        """Alerts of the drill that fire. That of slow training may, too: these steps are short."""
        alerts = self._get("alerts").get("alerts", [])
        return _DRILL & {one["labels"]["alertname"] for one in alerts if one["state"] == "firing"}


@pytest.fixture
def prometheus(memory: Path, tmp_path: Path) -> Iterator[Prometheus]:
    with ExitStack() as ends:
        exporter, url = serve()
        ends.callback(exporter.kill)
        place = tmp_path / "prometheus"
        place.mkdir()
        server = Prometheus(place, url.removeprefix("http://").removesuffix("/metrics"))
        ends.callback(server.process.kill)
        wait_for(lambda: server.value('up{job="rekindle"}') == 1, what="a scrape")
        yield server


def equal_costs(prometheus: Prometheus, costs: Costs) -> bool:
    """True if Prometheus has all that the rank's page says."""
    buckets = {float(le): count for le, count in prometheus.values("rekindle_stall_seconds_bucket").items()}
    told = {
        "step": costs.step,
        "steps_total": costs.steps,
        "saves_total": costs.saves,
        "snapshot_bytes_total": costs.snapshot_bytes,
        "snapshot_seconds_total": costs.snapshot_seconds,
        "stall_seconds_sum": costs.stalls.total,
        "step_seconds_sum": costs.step_seconds.total,
        "step_seconds_count": costs.step_seconds.count,
        "restored_step": costs.restored_step,
    }
    whole = dict(zip((*BOUNDS, math.inf), itertools.accumulate(costs.stalls.counts), strict=True))
    return buckets == whole and all(prometheus.value(f"rekindle_{name}") == value for name, value in told.items())


def test_its_values_are_those_of_the_records_through_a_kill(prometheus: Prometheus, memory: Path, root: Path) -> None:
    job = JobDir.of(root, memory_base(memory))
    first = Trainer(root)
    wait_for(lambda: (prometheus.value("rekindle_step") or 0) > 20, what="steps")
    with first.held():
        wait_for(lambda: equal_costs(prometheus, rank_costs(job)[0]), what="the numbers of the first start")
        wait_for(lambda: prometheus.values("rekindle_checkpoint_step").get("storage"), what="a step on storage")
        assert prometheus.values("rekindle_checkpoint_step")["memory"] == rank_costs(job)[0].step
    before = prometheus.value("sum(rekindle_incidents_total)")
    first.process.send_signal(signal.SIGKILL)
    assert first.process.wait(30) == -signal.SIGKILL and before == 0
    second = Trainer(root)
    wait_for(lambda: (prometheus.value("rekindle_outage_seconds_count") or 0) == 1, what="the recovery")
    with second.held():
        wait_for(lambda: equal_costs(prometheus, rank_costs(job)[0]), what="the numbers of the second start")
        records, _ = find_incidents(job)
        (fault,) = (record for record in records if record.is_fault)
        assert rank_costs(job)[0].restored_step == fault.restored_step > 20
        assert prometheus.values("rekindle_incidents_total > 0") == {"signal": 1}
        parts = {name: seconds for name, seconds in fault.parts().items() if seconds is not None}
        assert prometheus.values("rekindle_recovery_seconds_sum and rekindle_recovery_seconds_count > 0") == parts
        assert prometheus.value("rekindle_outage_seconds_sum") == fault.outage
        assert prometheus.value("rekindle_lost_steps_total") == fault.lost
        goodput = add_up(records).goodput
        assert prometheus.value("rekindle_goodput_ratio") == pytest.approx(goodput, abs=0.1)
    last = rank_costs(job)[0].step + 5
    broken = second.finish(last)
    assert broken == Trainer(root.with_name("unbroken")).finish(last)


def test_alerts_fire_in_a_drill_and_stop(prometheus: Prometheus, memory: Path, root: Path) -> None:
    job, away = JobDir.of(root, memory_base(memory)), root.with_name("away")
    trainer = Trainer(root)
    try:
        wait_for(lambda: prometheus.values("rekindle_checkpoint_step").get("storage"), what="a step on storage")
        wait_for(lambda: not prometheus.firing(), what="quiet")

        root.rename(away)
        root.write_text("no directory")  # storage refuses all
        wait_for(
            lambda: {"RekindleStorageRefuses", "RekindleNothingDurable"} <= prometheus.firing(), 120, what="alerts"
        )
        assert "RekindleNoAgent" not in prometheus.firing()
        root.unlink()
        away.rename(root)
        wait_for(lambda: not prometheus.firing(), 120, what="the end of alerts of storage")

        trainer.process.send_signal(signal.SIGSTOP)  # else it starts another agent
        agent = job.agent()
        assert agent is not None
        os.kill(agent, signal.SIGKILL)
        wait_for(lambda: "RekindleNoAgent" in prometheus.firing(), what="the alert of the agent")
        assert job.agent() is None
        trainer.process.send_signal(signal.SIGCONT)
        wait_for(lambda: "RekindleNoAgent" not in prometheus.firing(), 120, what="the end of the agent's alert")
        assert job.agent() not in (None, agent)
        wait_for(lambda: not prometheus.firing(), 120, what="quiet in the end")
        trainer.finish(rank_costs(job)[0].step + 5)
    finally:
        trainer.process.kill()
