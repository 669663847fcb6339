"""Real Ray Train: workers are killed, and a node is taken away; a run ends as the one that was not, bit for bit."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from rekindle.errors import UsageError
from rekindle.integrations.ray.roots import root_below
from rekindle.integrations.ray.surroundings import describe_shortage
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.storage.posix import PosixStore
from tests.faults.harness import end_agent, wait_for
from tests.integrations.environments import PROGRAMS, REPO, environment, lines, ranks_of, without_ours
from tests.integrations.raylets import LONG, OURS, PROMPT, Cluster

PACE = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.2",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "240",
}
"""Environment in which Ray looks after its workers often, and gives them time to start. A report waits until the one
before was taken."""
NO_WATCHER = {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"}
"""Environment that saves Ray a process for each start of its workers: nobody is told of a preemption."""
SINGLE = {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""Environment of a process group of one."""
CASE = {"named": True, "workers": 1, "epochs": 3, "dying": [], "dies": 0, "by": "SIGKILL", "hold": 0, "failures": 1}
STEPS = {1: 36, 2: 18}
"""Updates by number of workers, in three epochs."""
SAME = ("weights", "optimizer", "schedule", "losses")

End = dict[str, Any]


@contextmanager
def training(place: Path, case: dict[str, Any], **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Starts the program, whose output goes to ``PLACE/out``. Ends it, and what it has started, in any case."""
    modules = {"PYTHONPATH": f"{REPO / 'src'}:{PROGRAMS}", "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    with open(place / "out", "wb") as out:
        driver = subprocess.Popen(
            [environment("ray"), str(PROGRAMS / "train_ray.py"), str(place), json.dumps({**CASE, **case})],
            env={**os.environ, **modules, **OURS, **PROMPT, **PACE, **variables},
            stdout=out,
            stderr=out,
            cwd=place,
            start_new_session=True,
        )
    try:
        yield driver
    finally:
        with suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()


def end_of(place: Path, name: str) -> End:
    """Returns what a case has ended with."""
    path = place / f"{name}.json"
    assert path.exists(), (place / "out").read_text()[-8000:]
    end: End = json.loads(path.read_text())
    return end


def reported(place: Path, name: str) -> list[End]:
    """Returns all that Ray was reported in a case, in order."""
    path = place / f"{name}.reported"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def newest_stored(root: Path) -> int:
    return max((entry.stamp.step for entry in PosixStore(root).published()), default=0)


def plain_end(place: Path, steps: int, workers: int = 1, epochs: int = 3) -> End:
    """Trains without Ray and Rekindle, and without a fault. Returns what that ends with."""
    modules, single = f"{REPO / 'src'}:{PROGRAMS}", SINGLE if workers == 1 else {}
    codes = ranks_of(workers, environment("ray"), "train_plain", epochs, where=place, PYTHONPATH=modules, **single)
    assert codes == [0] * workers
    end: End = json.loads(lines(place, "train_plain")["end"])
    assert len(end["losses"]) == steps
    return end


def check_end(place: Path, name: str, steps: int, workers: int = 1, epochs: int = 3) -> End:
    """Checks that a case has ended as a run without a fault, and what Ray was told of it. Returns its end."""
    end, unbroken = end_of(place, name), plain_end(place, steps, workers, epochs)
    assert {key: end[key] for key in SAME} == {key: unbroken[key] for key in SAME}
    reports = reported(place, name)
    assert all(unbroken["losses"][report["step"] - 1] == report["loss"] for report in reports)
    assert {report["step"] for report in reports} >= set(range(end["start"] + 1, steps + 1))
    assert end["pointer"] == {"root": end["root"], "step": steps}
    return end


@pytest.mark.campaign(seconds=40)
@pytest.mark.timeout(900)
def test_killed_one_of_one(memory: Path, tmp_path: Path) -> None:
    """On a cluster that kills agents, in a run without a name: both are said, and cost nothing."""
    dies = random.randrange(4, STEPS[1])
    killed = {"name": "killed", "named": False, "dying": [0], "dies": dies}
    subreaper = {"RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper": "true"}
    with training(tmp_path, killed, **NO_WATCHER, **subreaper) as driver:
        driver.wait(5 * LONG)
    end = check_end(tmp_path, "killed", STEPS[1])
    assert end["start"] in (dies - 1, dies - 2), "the newest copy may have been under way"
    assert end["from"] == "memory"
    output = (tmp_path / "out").read_text()
    assert "subreaper is set: when a worker ends, Ray kills the agent" in output
    assert "this run has no name" in output
    runs = [path.parent for path in (tmp_path / "ray").glob("*/rekindle")]
    assert [str(run / "rekindle") for run in runs] == [end["root"]]
    kept = json.loads((runs[0] / "checkpoint_manager_snapshot.json").read_text())["checkpoint_results"]
    assert len(kept) == 1, "num_to_keep is for pointers"
    assert newest_stored(runs[0] / "rekindle") == STEPS[1]


@pytest.mark.campaign(seconds=45)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dying", [[1], [0, 1]], ids=["one", "all"])
def test_killed_of_two(dying: list[int], memory: Path, tmp_path: Path) -> None:
    dies = random.randrange(4, STEPS[2])
    killed = {"name": "killed", "workers": 2, "dying": dying, "dies": dies}
    with training(tmp_path, killed, **NO_WATCHER) as driver:
        driver.wait(5 * LONG)
    end = check_end(tmp_path, "killed", STEPS[2], workers=2)
    assert end["start"] in (dies, dies - 1, dies - 2), "a survivor may have made the update"
    assert end["from"] == "memory"


@pytest.mark.campaign(seconds=40)
@pytest.mark.timeout(900)
def test_a_worker_that_is_sent_sigterm(memory: Path, tmp_path: Path) -> None:
    """Ray takes the signal, and ends the worker: a death as any other."""
    dies = random.randrange(4, STEPS[1])
    with training(tmp_path, {"name": "sent", "dying": [0], "dies": dies, "by": "SIGTERM"}, **NO_WATCHER) as driver:
        driver.wait(5 * LONG)
    end = check_end(tmp_path, "sent", STEPS[1])
    assert (end["start"], end["from"]) == (dies - 1, "memory")


@pytest.mark.campaign(seconds=30)
@pytest.mark.timeout(900)
def test_an_agent_that_is_killed(memory: Path, tmp_path: Path) -> None:
    """Training goes on with another one, which carries its end to storage."""
    job = JobDir.of(str(tmp_path / "ray" / "alone" / "rekindle"), memory_base(memory))
    with training(tmp_path, {"name": "alone", "hold": 7, "failures": 0}, **NO_WATCHER) as driver:
        wait_for(lambda: len(reported(tmp_path, "alone")) >= 7, 2 * LONG, "no steps are reported")
        before = wait_for(job.agent, what="no agent")
        end_agent(job)
        (tmp_path / "go").touch()
        driver.wait(5 * LONG)
    assert job.agent() != before
    assert check_end(tmp_path, "alone", STEPS[1])["start"] == 0


@pytest.fixture
def elsewhere(tmp_path: Path, memory: Path) -> Iterator[Path]:
    """The memory store of another node."""
    (other := tmp_path / "memory").mkdir(mode=0o700)
    if other.stat().st_dev == memory.stat().st_dev:
        pytest.skip("temporary files lie on the file system of the memory store: see pytest's --basetemp")
    yield other
    for directory in other.glob("rekindle-*/*"):
        end_agent(JobDir(directory))


@pytest.mark.campaign(seconds=55)
@pytest.mark.timeout(900)
def test_a_node_that_is_taken_away(memory: Path, elsewhere: Path, tmp_path: Path) -> None:
    """The step under way is secured, and Ray counts a preemption, as it may count no failure. Memory is lost."""
    cluster = Cluster(tmp_path)
    leaving = {"name": "leaving", "epochs": 5, "hold": 7, "failures": 0}
    root = tmp_path / "ray" / "leaving" / "rekindle"
    try:
        cluster.add(tmp_path / "head", processors=0)
        cluster.add(memory)
        with training(tmp_path, leaving, **cluster.environment()) as driver:
            wait_for(lambda: len(reported(tmp_path, "leaving")) >= 7, 2 * LONG, "no steps are reported")
            cluster.preempt(reported(tmp_path, "leaving")[-1]["node"], seconds=30)
            (tmp_path / "go").touch()
            job = JobDir.of(str(root), memory_base(memory))
            wait_for(lambda: not job.trainers(), LONG, "the worker does not go")
            before = [report["step"] for report in reported(tmp_path, "leaving")]
            wait_for(lambda: newest_stored(root) >= before[-1], LONG, "the step does not come to storage")
            cluster.add(elsewhere)
            driver.wait(5 * LONG)
        end = check_end(tmp_path, "leaving", 60, epochs=5)
    finally:
        cluster.end()
    assert end["from"] == "storage"
    assert 7 <= before[-1] <= end["start"] <= before[-1] + 2, "Ray may not have had the newest report"
    assert "was told to go by Ray: its node is to be taken away" in (tmp_path / "out").read_text()


@pytest.mark.campaign(seconds=60)
@pytest.mark.timeout(1500)
def test_one_of_two_nodes_that_is_taken_away(
    memory: Path, elsewhere: Path, small_tmpfs: Callable[[int], Path], tmp_path: Path
) -> None:
    """The worker on the other node leaves with it, and Ray counts no failure for that either."""
    cluster, third = Cluster(tmp_path), small_tmpfs(200_000_000)
    leaving = {"name": "leaving", "workers": 2, "epochs": 5, "hold": 7, "failures": 0}
    try:
        cluster.add(tmp_path / "head", processors=0)
        cluster.add(memory)
        cluster.add(elsewhere)
        with training(tmp_path, leaving, **cluster.environment()) as driver:
            wait_for(lambda: len(reported(tmp_path, "leaving")) >= 7, 4 * LONG, "no steps are reported")
            cluster.preempt(reported(tmp_path, "leaving")[-1]["node"], seconds=30)
            (tmp_path / "go").touch()
            cluster.add(third)
            driver.wait(5 * LONG)
        end = check_end(tmp_path, "leaving", 30, workers=2, epochs=5)
    finally:
        cluster.end()
        for directory in third.glob("rekindle-*/*"):
            end_agent(JobDir(directory))
    assert end["start"] >= 7, "training has begun anew"
    assert "was told to go by Ray: its node is to be taken away" in (tmp_path / "out").read_text()


@pytest.mark.campaign(seconds=30)
@pytest.mark.timeout(900)
def test_local_mode(memory: Path, tmp_path: Path) -> None:
    """There Ray trains in the main thread, where SIGTERM is the notice, and keeps nothing of the run.

    The installed Ray says of itself at the second start that it is a later one, which is named.
    """
    later = tmp_path / "later" / "ray-2.999.0.dist-info"
    later.mkdir(parents=True)
    (later / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 2.999.0\n")
    path = f"{later.parent}:{REPO / 'src'}:{PROGRAMS}"
    torchrun = {**SINGLE, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    told = {"name": "local", "workers": 0, "dying": [0], "dies": 8, "by": "SIGTERM"}
    with training(tmp_path, told, **torchrun) as driver:
        assert driver.wait(LONG) == 128 + signal.SIGTERM, (tmp_path / "out").read_text()
    with training(tmp_path, told, **torchrun, PYTHONPATH=path) as driver:
        assert driver.wait(LONG) == 0, (tmp_path / "out").read_text()
    end, unbroken = end_of(tmp_path, "local"), plain_end(tmp_path, STEPS[1])
    assert {key: end[key] for key in SAME} == {key: unbroken[key] for key in SAME}
    assert (end["start"], end["pointer"]) == (7, None)
    output = (tmp_path / "out").read_text()
    assert "ray 2.999.0: Rekindle's adapter was tested with 2.60" in output and "has no name" not in output


@pytest.mark.campaign(seconds=60)
@pytest.mark.timeout(900)
def test_without_rekindle_it_is_the_script_that_users_have(memory: Path, tmp_path: Path) -> None:
    """It runs by the same command, with the same losses to the last bit: the adapter changes nothing of training."""
    script = (REPO / "examples/train_ray.py").read_text()
    before = {
        "Resumable(": "(",
        "for _epoch in range(data.epoch, EPOCHS):\n": (
            "for _epoch in range(EPOCHS):\n            sampler.set_epoch(_epoch)\n"
        ),
        "report(ckpt, {": "ray.train.report({",
    }
    for ours, theirs in before.items():
        assert ours in script
        script = script.replace(ours, theirs)
    losses = {}
    for name, text in {"with": (REPO / "examples/train_ray.py").read_text(), "without": without_ours(script)}.items():
        place = tmp_path / name
        place.mkdir()
        kept = f"open({str(place)!r} + f'/{{context.get_world_rank()}}', 'a')"
        (place / "train.py").write_text(
            text.replace("optimizer.step()", f"optimizer.step(); print(loss.item(), file={kept})")
        )
        done = subprocess.run(
            [environment("ray"), str(place / "train.py"), str(place / "run"), "--workers", "2"],
            env={**os.environ, "PYTHONPATH": str(REPO / "src"), "OMP_NUM_THREADS": "1", **OURS, **PROMPT, **PACE},
            cwd=place,
            capture_output=True,
            text=True,
            timeout=3 * LONG,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        losses[name] = [(place / rank).read_text().splitlines() for rank in "01"]
    assert not re.search("import rekindle|from rekindle|ckpt", (tmp_path / "without" / "train.py").read_text())
    assert losses["with"] == losses["without"] and len(losses["with"][0]) == 640


def test_roots() -> None:
    """Below a run on storage of any kind that Rekindle can open."""
    assert root_below("local", "/runs/17") == "/runs/17/rekindle"
    assert root_below("s3", "bucket/runs/17") == "s3://bucket/runs/17/rekindle"
    assert root_below("gcs", "bucket/runs/17") == "gs://bucket/runs/17/rekindle"
    with pytest.raises(UsageError, match="type 'hdfs', which Rekindle can't open"):
        root_below("hdfs", "/runs/17")


@pytest.mark.parametrize(
    ("snapshot", "objects", "short"),
    [(10, 70, False), (10, 71, True), (40, 0, False), (40, 101, False)],
    ids=["fits", "does not", "unknown", "a store elsewhere"],
)
def test_memory_beside_the_object_store(snapshot: int, objects: int, short: bool) -> None:
    assert (describe_shortage(snapshot, objects, 100) is not None) == short


def test_lines_that_a_user_adds() -> None:
    """Two to a program that has a Checkpointer: an import, and the report, which takes the place of Ray's own.

    And the last report, for a Result that names the last step.
    """
    script = (REPO / "examples/train_ray.py").read_text()
    code = [line.strip() for line in script.split('"""', 2)[2].splitlines()]
    added = [line for line in code if "integrations.ray" in line or "report(" in line or "root()" in line]
    added = [line for line in added if "rekindle.Checkpointer(" not in line]
    assert len(added) == 3 and "notices=notices()" in script, added
