"""Files in an object store: whole or not there, with a server that refuses for a while."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch

import rekindle
from rekindle.agent.file_drain import FileDrainer
from rekindle.memory.files_dir import FilesDir
from tests.faults.harness import wait_for
from tests.files.programs import KILLED, arrives, run
from tests.files.test_bad_input import flip
from tests.files.test_kills import PLACED, POINTS_OF_AGENTS, save_with_an_agent_that_dies
from tests.files.test_save_and_load import assert_same, forget, state
from tests.objects.proxy import Proxy
from tests.objects.servers import Server

pytest.importorskip("obstore")


@pytest.fixture
def url(s3: Server, bucket: str) -> str:
    return f"s3://{bucket}/files/{time.monotonic_ns()}"


def test_a_state_comes_back_from_memory_and_from_the_bucket(
    drainer: FileDrainer,
    store: FilesDir,
    url: str,
    s3: Server,
    bucket: str,
) -> None:
    saved = state()
    rekindle.save(saved, f"{url}/x.pt")
    assert_same(rekindle.load(f"{url}/x.pt"), saved)
    assert drainer.tick()
    body = s3.client().get_object(Bucket=bucket, Key=f"{url.partition(bucket + '/')[2]}/x.pt")["Body"].read()
    assert_same(torch.load(io.BytesIO(body), weights_only=True), saved)
    flip(store)
    assert_same(rekindle.load(f"{url}/x.pt"), saved)
    forget(store)
    assert_same(rekindle.load(f"{url}/x.pt"), saved)
    rekindle.files.preload(f"{url}/x.pt")
    assert [file.state for file in rekindle.files.status()] == ["both"]
    assert_same(rekindle.load(f"{url}/x.pt"), saved)


def test_the_newest_wins_in_a_bucket(drainer: FileDrainer, store: FilesDir, url: str) -> None:
    rekindle.save(b"older", f"{url}/x")
    assert drainer.tick()
    rekindle.save(b"newer", f"{url}/x")
    assert rekindle.load(f"{url}/x") == b"newer"
    assert drainer.tick()
    rekindle.files.configure(limit=10)
    large = bytes(range(256)) * 100_000
    assert rekindle.save(large, f"{url}/x") == "storage"
    assert rekindle.load(f"{url}/x", raw=True) == large
    with pytest.raises(rekindle.NotFoundError):
        rekindle.load(f"{url}/y")


def test_a_write_to_the_bucket_that_dies_leaves_the_old_object(store: FilesDir, url: str) -> None:
    save = "rekindle.save(sys.argv[2].encode() * 10_000_000, sys.argv[1])"
    assert run(f"rekindle.files.configure(limit=1); {save}", f"{url}/x", "old") == 0
    assert run(f"rekindle.files.configure(limit=1); {save}", f"{url}/x", "new", point="upload.copying") == KILLED
    assert rekindle.load(f"{url}/x", raw=True) == b"old" * 10_000_000


@pytest.mark.campaign
@pytest.mark.parametrize("point", POINTS_OF_AGENTS)
def test_an_agent_that_dies_at(point: str, store: FilesDir, url: str, s3: Server, bucket: str) -> None:
    def there() -> bytes:
        return bytes(s3.client().get_object(Bucket=bucket, Key=f"{url.partition(bucket + '/')[2]}/x")["Body"].read())

    data = save_with_an_agent_that_dies(store, point, f"{url}/x")
    assert there() == (data if point in PLACED else b"old")
    assert rekindle.load(f"{url}/x") == data
    arrives(store)
    assert there() == data


@pytest.fixture
def proxy(s3: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with Proxy(s3.endpoint) as between:
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.endpoint)
        yield between


@pytest.mark.campaign(7)
@pytest.mark.parametrize("mood", ["busy", "silent"])
def test_a_server_that_is_in_trouble_for_a_while(
    mood: str, drainer: FileDrainer, url: str, proxy: Proxy, s3: Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_SHORT", "_SHORT_IN_ALL", "_LONG", "_LONG_IN_ALL"):  # a test need not wait for minutes
        monkeypatch.setattr(f"rekindle.storage.bucket.{name}", timedelta(seconds=5))
    proxy.mood = mood
    rekindle.save(b"data", f"{url}/x")
    assert not drainer.tick() and f"{url}/x: " in (drainer.progress.error or "")
    assert rekindle.load(f"{url}/x") == b"data"
    with pytest.raises(rekindle.NotDurableError):
        rekindle.flush(timeout=0.1)
    proxy.mood = "well"
    wait_for(drainer.tick)
    assert s3.client().get_object(Bucket=bucket, Key=f"{url.partition(bucket + '/')[2]}/x")["Body"].read() == b"data"
    rekindle.flush(f"{url}/x", timeout=0.1)
