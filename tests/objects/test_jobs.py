"""Jobs whose root is an object store: training, restarts, commands, DCP, and agents that are killed while they send."""

from __future__ import annotations

import json
import logging
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import rekindle
from rekindle.agent.drain import Drainer
from rekindle.cli.main import main
from rekindle.common.os_errors import explain
from rekindle.errors import UsageError
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.format.names import canonical_root
from rekindle.memory.incidents import write_incident
from rekindle.memory.job import JobInfo
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.memory.slots import Slots
from rekindle.storage import bucket as bucket_module
from rekindle.storage import incidents
from rekindle.storage.catalog import find_copies
from rekindle.storage.objects import ObjectStore
from rekindle.storage.open import open_store
from rekindle.storage.verify import verify
from rekindle.testing import make_shard
from tests.conftest import commit
from tests.memory.test_incident import some
from tests.objects.proxy import Proxy
from tests.objects.servers import Server, free_port, moto, rclone

FIRST = Incarnation(1, "a" * 16)
MIB = 1 << 20
KILLS = int(os.environ.get("REKINDLE_TEST_KILLS", "2"))


@pytest.fixture
def url(s3: Server, bucket: str) -> str:
    return f"s3://{bucket}/{secrets.token_hex(4)}/run17"


@pytest.fixture
def snapshot(memory: Path) -> Iterator[Callable[..., JobDir]]:
    """Puts a snapshot of so many bytes into memory, and says what the job is."""
    with ExitStack() as stack:

        def save(
            root: str, step: int, nbytes: int, drain_limit: int | None = None, ranks: int = 1, damaged: int = -1
        ) -> JobDir:
            job, everyone = JobDir.of(root, memory_base()), list(range(ranks))
            job.create()
            job.write_job(JobInfo(root, everyone, ranks, 1, None, 600.0, drain_limit))
            for rank in everyone:
                stamp = ShardId(step, rank, ranks, FIRST)
                receipt, data = make_shard(stamp, {f"x{rank}": random.Random(step).randbytes(nbytes)})
                slots = Slots(job, rank, ranks, everyone)
                stack.callback(slots.close)
                commit(slots, receipt, data[:-1] + bytes([data[-1] ^ (rank == damaged)]))
            return job

        yield save


def state() -> dict[str, Any]:
    torch.manual_seed(7)
    model = torch.nn.Linear(64, 64)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def train(url: str, steps: int, **options: Any) -> tuple[int, torch.Tensor]:
    """The step gone on from, and the weights in the end."""
    live = state()
    ckpt = rekindle.Checkpointer(url, state=live, **{"persist_seconds": 0} | options)
    start = ckpt.restore()
    for step in range(start + 1, start + steps + 1):
        live["optimizer"].zero_grad()
        live["model"](torch.randn(8, 64)).square().mean().backward()
        live["optimizer"].step()
        ckpt.step(step)
    ckpt.close()
    return start, live["model"].weight.detach().clone()


def command(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


# -- as a user sees it -----------------------------------------------------------------------------------------------


def test_a_job_goes_on_from_an_object_store_and_every_command_knows_it(url: str, memory: Path, tmp_path: Path) -> None:
    assert train(url, 3)[0] == 0
    assert not any(JobDir.of(url, memory_base()).path.glob("step-*"))
    _, whole = train(f"{url}-whole", 6)
    start, weights = train(url + "/", 3)
    assert start == 3 and torch.equal(weights, whole)
    listed = json.loads(command("ls", url, "--json").stdout)
    assert next(entry["step"] for entry in listed if entry["place"] == "storage") == 6
    for arguments in (
        ["verify", url],
        ["inspect", url, "6"],
        ["export", url, str(tmp_path / "out"), "--format", "torch"],
    ):
        done = command(*arguments)
        assert done.exit_code == 0, done.output
    assert torch.equal(torch.load(tmp_path / "out")["model"]["weight"], whole)
    done = command("import", str(tmp_path / "out"), f"{url}-again", "9")
    assert done.exit_code == 0, done.output
    assert [entry.stamp.step for entry in open_store(f"{url}-again").published()] == [9]
    assert command("ls", f"{url}-nothing").exit_code == 3


def test_a_parent_of_runs_names_what_is_below_it(url: str, memory: Path) -> None:
    stamp = ShardId(3, 0, 1, Incarnation(1, "11" * 8))
    receipt, shard = make_shard(stamp, {"a": b"12345678"})
    for name in ("a", "b"):
        store = open_store(f"{url}/runs/{name}")
        store.write_shard(receipt, memoryview(shard), lambda _: None)
        assert store.publish(stamp)
    done = command("ls", f"{url}/runs")
    assert done.exit_code == 3 and done.stderr.splitlines()[1:] == [f"  {url}/runs/a", f"  {url}/runs/b"]
    done = command("ls", f"{url}/runs/a/step-0000000003.{'11' * 8}")
    assert done.exit_code == 3 and f"'rekindle inspect {url}/runs/a 3'" in done.stderr
    assert "nothing is there: no job has saved there yet" in command("ls", f"{url}/elsewhere").stderr


def test_stop_carries_what_only_memory_holds(url: str, snapshot: Callable[..., JobDir]) -> None:
    job = snapshot(url, 3, 5 * MIB)
    assert json.loads(command("status", url, "--json").stdout)[0]["memory_steps"] == [3]
    done = command("stop", url)
    assert done.exit_code == 0, done.output
    assert open_store(url).find(3) is not None and not job.path.exists()


def test_records_of_incidents_lie_beside_the_checkpoints(
    url: str, snapshot: Callable[..., JobDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incidents, "_MOST", 2)
    job = snapshot(url, 3, 1000)
    for generation in (1, 2, 3):
        write_incident(job, some(generation=generation, start=f"{generation:016x}"))
    drainer = Drainer(job)
    assert drainer.tick() and not drainer.tick()
    assert job.remove()
    store = open_store(url)
    store.write_extra("incidents/0000000009-foreign.jsonl", b"{")
    done = command("incidents", url, "--json")
    assert done.exit_code == 0 and "0000000009-foreign.jsonl is no record" in done.stderr, done.output
    assert [one["generation"] for one in json.loads(done.stdout)["incidents"]] == [3]
    assert [entry.stamp.step for entry in store.published()] == [3]


def test_a_prefix_that_was_emptied_is_a_run_that_was_deleted(
    url: str, snapshot: Callable[..., JobDir], caplog: pytest.LogCaptureFixture
) -> None:
    job = snapshot(url, 3, 1000)
    assert Drainer(job).tick() and job.notes.durable() == 3
    snapshot(url, 4, 1000)
    store = ObjectStore(url)
    store.bucket.delete([found.name for found in store.bucket.walk()])
    drainer = Drainer(job)
    assert not drainer.tick() and drainer.pending() is None and "was deleted" in str(drainer.progress.given_up)
    assert train(url, 2)[0] == 0 and f"checkpoints of an earlier run were deleted from {url}" in caplog.text
    assert train(url, 1)[0] == 2


def test_without_a_memory_store_saves_go_straight_there(url: str, memory: Path) -> None:
    train(url, 2, memory_limit=1)
    start, weights = train(url, 1, memory_limit=1)
    assert start == 2 and torch.equal(weights, train(f"{url}-whole", 3)[1])


def test_dcp_saves_and_loads(url: str, memory: Path) -> None:
    import torch.distributed.checkpoint as dcp

    from rekindle.integrations.dcp import RekindleReader, RekindleWriter

    saved = {"a": torch.arange(100.0), "b": {"c": torch.ones(3, 3)}, "n": 5}
    writer = RekindleWriter(url)
    dcp.save(saved, storage_writer=writer, checkpoint_id=f"{url}/step-4")
    writer.close()
    loaded = {"a": torch.zeros(100), "b": {"c": torch.zeros(3, 3)}, "n": 0}
    dcp.load(loaded, storage_reader=RekindleReader(f"{url}/step-4"))
    assert torch.equal(loaded["a"], saved["a"]) and torch.equal(loaded["b"]["c"], saved["b"]["c"]) and loaded["n"] == 5


def test_damaged_bytes_are_found_and_an_older_checkpoint_is_loaded(url: str, memory: Path, s3: Server) -> None:
    train(url, 2, snapshot_every=2)
    train(url, 2, snapshot_every=2)
    name, _, key = url.removeprefix("s3://").partition("/")
    client = s3.client()
    listed = client.list_objects_v2(Bucket=name, Prefix=f"{key}/step-0000000004.")["Contents"]
    (shard,) = [entry["Key"] for entry in listed if entry["Key"].endswith(".safetensors")]
    data = bytearray(client.get_object(Bucket=name, Key=shard)["Body"].read())
    data[-100] ^= 1
    client.put_object(Bucket=name, Key=shard, Body=bytes(data))
    assert command("verify", url).exit_code == 4
    assert train(url, 1)[0] == 2


# -- agents that are killed ------------------------------------------------------------------------------------------


def uploads(server: Server, name: str) -> list[str]:
    return [entry["Key"] for entry in server.client().list_multipart_uploads(Bucket=name).get("Uploads", [])]


def test_an_agent_killed_while_it_sends_leaves_nothing_half(s3: Server, snapshot: Callable[..., JobDir]) -> None:
    """``REKINDLE_TEST_KILLS=20`` for more of them."""
    name, luck = s3.bucket(), random.Random(5)
    url = f"s3://{name}/run"
    for step in range(1, KILLS + 1):
        job = snapshot(url, step, 80 * MIB, drain_limit=60 * MIB)
        agent = subprocess.Popen([sys.executable, "-m", "rekindle.agent", str(job.path)])
        deadline = time.monotonic() + 60
        while not uploads(s3, name):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(luck.uniform(0, 0.8))
        agent.send_signal(signal.SIGKILL)
        agent.wait()
        assert [copy.step for copy in find_copies(None, open_store(url))] == [step - 1] * (step > 1)
        assert uploads(s3, name), "was killed too late for this test"
        drainer = Drainer(job)
        drainer.hurry()
        assert drainer.tick(), drainer.progress.error
        copies = find_copies(None, open_store(url))
        assert [(copy.step, verify(copy)) for copy in copies] == [(step, [])]
        assert uploads(s3, name) == []
        assert len(s3.client().list_objects_v2(Bucket=name)["Contents"]) == 3
        job.remove()


# -- servers in trouble ----------------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_SHORT", "_SHORT_IN_ALL", "_LONG", "_LONG_IN_ALL"):
        monkeypatch.setattr(bucket_module, name, timedelta(seconds=1))


def proxied(url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    return f"{url}-{secrets.token_hex(4)}"


@pytest.mark.parametrize("mood", ["silent", "busy"])
def test_a_server_that_doesnt_answer_costs_the_drain_and_not_the_snapshot(
    mood: str, url: str, snapshot: Callable[..., JobDir], impatient: None, monkeypatch: pytest.MonkeyPatch, s3: Server
) -> None:
    with Proxy(s3.endpoint) as proxy:
        url = proxied(url, proxy, monkeypatch)
        job = snapshot(url, 1, 20 * MIB)
        drainer = Drainer(job)
        proxy.mood = mood
        began = time.monotonic()
        assert not drainer.tick() and time.monotonic() - began < 30
        assert drainer.progress.error and url in drainer.progress.error
        with pytest.raises(OSError):
            open_store(url).published()
        proxy.mood = "well"
        deadline = time.monotonic() + 30
        while not drainer.tick():
            assert time.monotonic() < deadline, drainer.progress.error
            time.sleep(0.05)
        assert open_store(url).find(1) is not None and drainer.progress.error is None


def test_a_damaged_snapshot_is_given_up_though_its_parts_cant_be_removed(
    url: str, snapshot: Callable[..., JobDir], impatient: None, monkeypatch: pytest.MonkeyPatch, s3: Server
) -> None:
    with Proxy(s3.endpoint) as proxy:
        url = proxied(url, proxy, monkeypatch)
        drainer = Drainer(snapshot(url, 1, 5000, ranks=2, damaged=1))
        proxy.mood = "keeping"
        assert not drainer.tick() and proxy.refused
        assert drainer.progress.error and "differs from its checksum" in drainer.progress.error
        proxy.mood = "well"
        snapshot(url, 2, 5000, ranks=2)
        assert drainer.tick() and not open_store(url).has_shard(ShardId(1, 0, 2, FIRST))


@pytest.mark.campaign(seconds=8)
def test_a_server_without_conditional_writes_is_told_of_and_used(
    url: str,
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
    s3: Server,
    impatient: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Proxy(s3.endpoint) as proxy:
        proxy.mood = "unconditional"
        url = proxied(url, proxy, monkeypatch)
        with caplog.at_level(logging.WARNING):
            assert train(url, 2)[0] == 0
        assert "has no conditional writes" in caplog.text and proxy.refused
        assert train(url, 1)[0] == 2


def test_a_server_that_ignores_conditions_is_told_of(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with rclone(tmp_path) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        url = f"s3://{server.bucket()}/run"
        with caplog.at_level(logging.WARNING):
            ckpt = rekindle.Checkpointer(url, state=state())
            ckpt.close()
        assert caplog.text.count("ignores conditional writes") == 1
        assert open_store(url).published() == []


def test_a_good_server_has_no_weakness_and_keeps_nothing_of_the_question(url: str) -> None:
    store = open_store(url)
    assert isinstance(store, ObjectStore)
    assert store.capability_warning() is None and list(store.bucket.walk()) == []


def test_a_lost_answer_to_the_question_is_no_weakness(url: str, s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with Proxy(s3.endpoint) as proxy:
        store = open_store(proxied(url, proxy, monkeypatch))
        proxy.mood = "losing"
        assert store.capability_warning() is None and proxy.mood == "well"


def test_wrong_keys_are_an_error_that_names_the_root(url: str, s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    if s3.kind == "moto":
        pytest.skip("moto lets everybody in")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "WRONG")
    with pytest.raises(PermissionError, match=url):
        open_store(f"{url}-wrong").published()


def test_who_may_not_enter_is_told_which_keys_it_takes(monkeypatch: pytest.MonkeyPatch, memory: Path) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(OSError) as failure:  # 'rekindle ls' gives up after 10 s
        open_store("s3://b/without-keys").published()
    assert "set AWS_ACCESS_KEY_ID" in explain(failure.value)
    assert "set AZURE_STORAGE_ACCOUNT_NAME" in command("ls", "az://b/without-account").stderr
    monkeypatch.setenv("INITIAL_NO_AUTH_ACTION_COUNT", "0")  # moto then looks at keys
    with moto() as strict:
        for name, value in strict.environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(PermissionError) as failure:
            open_store("s3://b/with-wrong-keys").published()
    refused = explain(failure.value)
    assert "(InvalidAccessKeyId): see that the credentials in the environment are right" in refused


def test_while_the_server_is_away_memory_is_listed(
    monkeypatch: pytest.MonkeyPatch, snapshot: Callable[..., JobDir]
) -> None:
    for name, value in Server("none", f"http://127.0.0.1:{free_port()}").environment.items():
        monkeypatch.setenv(name, value)
    snapshot("s3://bucket/away", 3, MIB)
    found = command("ls", "s3://bucket/away", "--json")
    assert found.exit_code == 1
    assert json.loads(found.stderr)["error"]["message"].startswith("s3://bucket/away: ")
    assert [(entry["step"], entry["place"]) for entry in json.loads(found.stdout)] == [(3, "memory")]


# -- what it takes ---------------------------------------------------------------------------------------------------


def test_a_bucket_that_is_not_there_is_named(s3: Server) -> None:
    found = CliRunner().invoke(main, ["ls", "s3://nobody-made-this/run"])
    assert found.exit_code == 1
    assert "s3://nobody-made-this/run: there is no such bucket: see that its server answers" in " ".join(
        found.output.split()
    )


def test_one_root_has_one_name() -> None:
    assert canonical_root("s3://b/run/") == canonical_root("s3://b/run") == "s3://b/run"
    assert canonical_root("gs://b/x") == "gs://b/x" and canonical_root("az://b/c.d/e") == "az://b/c.d/e"
    for wrong in (
        "s3://",
        "s3://b",
        "gs://b/",
        "s3:///x",
        "s3://b//x",
        "s3://b/../x",
        "ftp://b/x",
        "s3://b/a b",
        "s3://b/a?c",
        "s3://b/a%20",
    ):
        with pytest.raises(UsageError):
            canonical_root(wrong)


def test_a_url_that_a_path_has_taken_a_slash_from_is_no_directory(tmp_path: Path) -> None:
    for text in ("s3://bkt/p", "gs://bkt/p", "az://bkt/p", "file:///bkt/p"):
        with pytest.raises(UsageError, match="pass it as a str: a Path removes one of them"):
            canonical_root(Path(text))
    refused = command("ls", "s3:/bkt/x")
    assert refused.exit_code == 2 and "two slashes" in refused.stderr
    assert canonical_root(tmp_path / "s3:" / "x") == tmp_path / "s3:" / "x"


def test_only_who_uses_an_object_store_needs_obstore(tmp_path: Path) -> None:
    without = "import sys; sys.modules['obstore'] = None; from rekindle.storage.open import open_store; "
    path = f"import rekindle.agent.service; open_store({str(tmp_path)!r}).published()"
    assert subprocess.run([sys.executable, "-c", without + path], check=False).returncode == 0
    code = "from rekindle.cli.main import main; sys.argv = ['rekindle', 'ls', 's3://b/x']; main()"
    done = subprocess.run([sys.executable, "-c", without + code], capture_output=True, text=True, check=False)
    assert done.returncode == UsageError.exit_code and "pip install" in done.stderr
