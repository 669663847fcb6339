"""Compile caches in an object store: carried, fetched, whole or not there."""

from __future__ import annotations

import os
import secrets
import time

import pytest

import rekindle
from rekindle.launch.compile_cache import _set_variables
from rekindle.launch.toolchain import toolchain_name
from rekindle.memory.compile_dir import CompileDir
from rekindle.memory.job_dir import memory_base
from rekindle.storage import packs
from rekindle.storage.packs import Packs
from tests.objects.servers import Server

ENTRIES = {"inductor/a": b"first", "triton/b/c": b""}


@pytest.fixture
def url(s3: Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in _names():
        monkeypatch.setenv(name, "")  # so that it is undone
        monkeypatch.delenv(name)
    return f"s3://{bucket}/{secrets.token_hex(4)}/run17"


def _names() -> list[str]:
    before = dict(os.environ)
    _set_variables(memory_base())
    names = [name for name in os.environ if name not in before]
    for name in names:
        del os.environ[name]
    return names


def contents(store: Packs) -> dict[str, bytes | None]:
    return {entry.path: data for pack in store.list() for entry, data in store.read(pack)}


def test_what_was_carried_is_there_on_a_fresh_node(url, memory):
    assert Packs(url, toolchain_name()).list() == []
    Packs(url, toolchain_name()).write(ENTRIES)
    Packs(url, "torch-1").write({"inductor/other": b"x"})
    cache = rekindle.CompileCache(url)
    assert cache.load() == 2
    directory = CompileDir.of(url, memory_base())
    assert (directory.path / toolchain_name() / "inductor" / "a").read_bytes() == b"first"
    assert cache.load() == 0
    cache._release()


def test_a_pack_without_an_index_and_a_damaged_one_are_not_read(url, server, bucket):
    store = Packs(url, "torch-1")
    store.write(ENTRIES)
    client, prefix = server.client(), url.removeprefix(f"s3://{bucket}/")
    (index,) = [
        found["Key"]
        for found in client.list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]
        if found["Key"].endswith(".json")
    ]
    whole = client.get_object(Bucket=bucket, Key=index)["Body"].read()
    client.put_object(Bucket=bucket, Key=index, Body=whole[:-1])
    damaged = Packs(url, "torch-1")
    assert damaged.list() == [] and len(damaged.damaged) == 1
    client.delete_object(Bucket=bucket, Key=index)
    assert Packs(url, "torch-1").list() == []
    client.put_object(Bucket=bucket, Key=index, Body=whole)
    assert contents(Packs(url, "torch-1")) == ENTRIES


def test_the_oldest_go_when_there_is_too_much(url, monkeypatch):
    store = Packs(url, "torch-1")
    for number in range(3):
        store.write({f"inductor/{number}": bytes(1000)})
        time.sleep(1.1)  # the service's clock may count whole seconds
    monkeypatch.setattr(packs, "_MOST_PACKS", 2)
    store.make_room()
    assert list(contents(Packs(url, "torch-1"))) == ["inductor/2", "inductor/1"]


def test_a_store_that_is_away_costs_one_line(url, memory, caplog, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    cache = rekindle.CompileCache(url)
    assert cache.load(timeout=30) == 0
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"compile cache of {url}: ") and line.endswith("are compiled anew")
    cache._release()
