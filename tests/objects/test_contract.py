"""Both stores keep what the contract promises."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event

import pytest
from click.testing import CliRunner

from rekindle.cli.main import main
from rekindle.format.claim import Claim, Starts
from rekindle.format.lineage import ShardId
from rekindle.format.names import MANIFEST, shard_name, step_dir
from rekindle.storage import objects
from rekindle.storage import open as stores
from rekindle.storage.bucket import Bucket
from rekindle.storage.commit import Committer
from rekindle.storage.object_files import StepObjects
from rekindle.testing import StoreContract, make_shard
from tests.interleave import before_call
from tests.objects.proxy import Proxy
from tests.objects.servers import Server
from tests.storage.saved import FIRST, SECOND, content, save, steps, tidy, write
from tests.storage.starts import WAIT, claimed
from tests.unreadable import unreadable


def die() -> None:
    raise KeyboardInterrupt


class TestDirectory(StoreContract):
    points = ("drain.copying", "drain.prune")  # tests/storage/test_posix.py dies at all of them

    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> None:
        self.root = str(tmp_path / "an odd näme, with #, % and ?" / "run")
        Path(self.root).parent.mkdir()

    def everything(self) -> set[str]:
        return {str(path) for path in Path(self.root).rglob("*") if path.is_file()}

    def damage(self, step: int) -> None:
        path = Path(self.root) / step_dir(step) / MANIFEST
        data = bytearray(path.read_bytes())
        data[-2] ^= 1
        path.write_bytes(data)

    @contextmanager
    def hidden(self, step: int) -> Iterator[None]:
        with unreadable(Path(self.root) / step_dir(step) / MANIFEST):
            yield


class TestObjects(StoreContract):
    points = ("drain.copying", "drain.shard", "drain.published")
    more_points = ("drain.written", "drain.receipt", "drain.prune")

    @pytest.fixture(autouse=True)
    def place(self, s3: Server, bucket: str) -> None:
        self.server, self.bucket, self.client = s3, bucket, s3.client()
        self.prefix = f"an.odd_(name)+=@,;!'*-{secrets.token_hex(4)}/run"
        self.root = f"s3://{bucket}/{self.prefix}"

    def everything(self) -> set[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=f"{self.prefix}/")
        return {entry["Key"].removeprefix(self.prefix) for page in pages for entry in page.get("Contents", [])}

    def damage(self, step: int) -> None:
        key = f"{self.prefix}/{step_dir(step)}.json"
        data = bytearray(self.client.get_object(Bucket=self.bucket, Key=key)["Body"].read())
        data[-2] ^= 1
        self.client.put_object(Bucket=self.bucket, Key=key, Body=bytes(data))

    @contextmanager
    def hidden(self, step: int) -> Iterator[None]:
        """As S3 answers for what a lifecycle rule has archived."""
        with Proxy(self.server.endpoint) as proxy, pytest.MonkeyPatch.context() as patch:
            proxy.archived = f"/{step_dir(step)}.json"
            patch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
            stores._objects.cache_clear()  # another process knows nothing
            yield
        stores._objects.cache_clear()

    @pytest.mark.campaign(seconds=8)
    def test_who_dies_at_more_points_leaves_nothing_half(self) -> None:
        self.points = self.more_points
        self.test_who_dies_in_the_middle_leaves_nothing_half()

    def test_receipts_without_their_shards_are_not_published(self) -> None:
        store = self.open()
        stamp = write(store, 1)
        [shard] = [name for name in self.everything() if name.endswith(shard_name(0, 1))]
        self.client.delete_object(Bucket=self.bucket, Key=self.prefix + shard)
        assert not store.publish(stamp)
        assert steps(store) == []

    @pytest.mark.parametrize(("step", "removed"), [(1, []), (2, [1])])
    def test_what_is_pinned_when_retention_has_just_chosen_it_stays(
        self, monkeypatch: pytest.MonkeyPatch, step: int, removed: list[int]
    ) -> None:
        """The pin comes between the look for it and the removal, or before both."""
        store, pinned = self.open(), ShardId(step, 0, 1, FIRST)
        save(store, *range(1, step + 2))
        with monkeypatch.context() as patch:
            met = before_call(0, Bucket, ["delete"], lambda: self.open().pin(pinned), patch)
            assert store.prune(1, None) == removed
        assert met() and steps(store) == [step, step + 1]
        self.assert_sound()

    @pytest.mark.parametrize("request_", ["head", "delete"])
    def test_what_a_later_start_publishes_while_retention_removes_that_step_stays(
        self, monkeypatch: pytest.MonkeyPatch, request_: str
    ) -> None:
        store = self.open()
        save(store, 5, 6)
        with monkeypatch.context() as patch:
            later = partial(save, self.open(), 5, incarnation=SECOND)
            met = before_call(0, Bucket, [request_], later, patch)
            store.prune(1, None)
        assert met() and (5, SECOND) in [(one.stamp.step, one.stamp.incarnation) for one in store.published()]
        store.clean_up()
        self.assert_sound()

    def test_shards_of_a_later_start_that_contradict_each_other_are_passed_over_by_retention(self) -> None:
        """Ranks 0 and 1 hold the same tensor with other shapes."""
        store, later = self.open(), [ShardId(5, rank, 2, SECOND) for rank in range(2)]
        save(store, 5, 6)
        for stamp in later:
            receipt, data = make_shard(stamp, {"x": b"x" * (1 + stamp.rank)})
            store.write_shard(receipt, memoryview(data), lambda nbytes: None)
        assert store.prune(1, None) == [5]
        store.clean_up()
        assert steps(store) == [6]
        self.assert_sound()

    @pytest.mark.parametrize("former", [True, False], ids=["removed for a former start", "without a manifest"])
    def test_what_a_start_that_has_lost_its_claim_was_refused_does_not_come_to_be_listed(self, former: bool) -> None:
        """Its shards are whole, and its pin is there: that is written before the last look for a claim."""
        store, refused = self.open(), ShardId(5, 0, 1, SECOND, pinned=True)
        save(store, *((5, 6) if former else (6,)))
        receipt, data = make_shard(refused, {"x": b"x"})
        store.write_shard(receipt, memoryview(data), lambda nbytes: None)
        lost = claimed(store, Starts(Claim(SECOND.id, SECOND.generation)))
        claimed(store, Starts(Claim("d" * 16, 3)))
        with pytest.raises(FileExistsError, match="the job goes on elsewhere"):
            Committer(store, None, lambda: lost).commit_if_complete(refused)
        assert any(name.endswith(f"{SECOND.id}.pinned") for name in self.everything())
        tidy(store)
        assert steps(store) == [6]
        self.assert_sound()

    def test_what_is_pinned_stays_though_who_removes_it_is_killed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The pin comes before the manifest goes, and the kill before the remover looks for a pin again."""
        store, pinned = self.open(), ShardId(1, 0, 1, FIRST)
        save(store, 1, 2)
        with monkeypatch.context() as patch:
            met = before_call(0, Bucket, ["delete"], lambda: self.open().pin(pinned), patch)
            before_call(0, Bucket, ["directories"], die, patch)
            with pytest.raises(KeyboardInterrupt):
                store.prune(1, None)
        assert met() and steps(self.open()) == [2]
        self.open().clean_up()
        assert steps(self.open()) == [2], "who removes it may live"
        monkeypatch.setattr(objects, "_REMOVED_WITHIN", 0.0)
        self.open().clean_up()
        assert [(one.stamp.step, one.pinned) for one in self.open().published()] == [(1, True), (2, False)]
        self.assert_sound()

    def test_a_pin_that_comes_too_late_for_a_removal_is_refused_though_others_tidy_meanwhile(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Who pins has seen the manifest. Who removes has looked for a pin the second time before it comes."""
        store, seen, late, put = self.open(), Event(), Event(), Bucket.put
        save(store, 1, 2)

        def put_late(bucket: Bucket, name: str, data: bytes) -> None:
            seen.set()
            assert late.wait(WAIT)
            put(bucket, name, data)
            self.open().clean_up()

        with ThreadPoolExecutor(1) as pool, monkeypatch.context() as patch:
            patch.setattr(Bucket, "put", put_late)
            pinning = pool.submit(self.open().pin, ShardId(1, 0, 1, FIRST))
            assert seen.wait(WAIT)
            met = before_call(0, Bucket, ["walk"], lambda: (late.set(), wait([pinning], WAIT)), patch)
            removed = store.prune(1, None)
        assert met() and removed == [1] and steps(self.open()) == [2]
        assert isinstance(pinning.exception(), FileNotFoundError)
        self.assert_sound()

    def test_what_a_later_start_saves_anew_while_it_is_verified_is_not_damaged(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = self.open()
        save(store, 4, 5)

        def save_again() -> None:
            save(self.open(), 5, incarnation=SECOND)
            self.open().clean_up()

        met = before_call(0, StepObjects, ["shard"], save_again, monkeypatch)
        result = CliRunner().invoke(main, ["verify", self.root, "5", "--json"])
        assert met() and result.exit_code == 0, result.output
        verdicts = [(entry["generation"], entry["verdict"].partition(":")[0]) for entry in json.loads(result.stdout)]
        assert verdicts == [(1, "gone"), (2, "sound")]

    def test_a_listing_asks_for_no_shard(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """A job may have many ranks. Who reads a shard asks for its size."""
        store, ranks = self.open(), range(5)
        for stamp in [write(store, step, rank, len(ranks)) for step in (1, 2) for rank in ranks]:
            store.publish(stamp)
        shards = [name for name in self.everything() if name.endswith(".safetensors")]
        size = sum(self.client.head_object(Bucket=self.bucket, Key=self.prefix + n)["ContentLength"] for n in shards)
        asked: list[str] = []
        head = Bucket.head
        monkeypatch.setattr(Bucket, "head", lambda bucket, name: asked.append(name) or head(bucket, name))

        def run(*arguments: str) -> str:
            result = CliRunner().invoke(main, [arguments[0], self.root, *arguments[1:]])
            assert result.exit_code == 0, result.output
            return result.stdout

        assert sum(entry["bytes"] for entry in json.loads(run("ls", "--json"))) == size
        run("inspect", "2")
        assert not asked
        run("verify", "2")
        run("export", str(tmp_path / "out"), "--format", "safetensors")
        assert len([name for name in asked if name.endswith(".safetensors")]) <= 3 * len(ranks)

    def test_foreign_objects_with_names_like_those_of_pins_and_damaged_manifests_are_left_alone(self) -> None:
        store, foreign = (
            self.open(),
            ["my.pinned", "step-best.pinned", "step-of mine.damaged", "step-0000000001.pinned"],
        )
        save(store, 1, 2)
        for name in foreign:
            store.write_extra(name, b"x")
        tidy(store)
        assert steps(store) == [2] and self.everything() >= {f"/{name}" for name in foreign}

    def test_what_another_process_removes_while_retention_looks_is_no_error(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = self.open()
        save(store, 1, 2)
        with monkeypatch.context() as patch:
            met = before_call(0, Bucket, ["head"], lambda: self.open().prune(1, None), patch)
            assert store.prune(1, None) == []
        assert met() and steps(store) == [2]
        self.assert_sound()

    def test_what_is_published_again_while_retention_removes_it_is_not_listed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = self.open()
        save(store, 1, 2)
        again = partial(self.open().publish, ShardId(1, 0, 1, FIRST))
        with monkeypatch.context() as patch:
            met = before_call(1, Bucket, ["delete"], again, patch)
            assert store.prune(1, None) == [1]
        assert met() and steps(store) == [2]
        self.assert_sound()

    def test_parts_that_nobody_completes_are_withdrawn_unless_another_rank_is_just_sending_its_own(self) -> None:
        store = self.open()
        for rank in (0, 1):
            for step in (1, 2, 3, 4, 5):
                write(store, step, rank, 3)
        receipt, data = make_shard(ShardId(2, 2, 3, FIRST), content(2, 2))
        assert store.withdraw(ShardId(5, 0, 3, FIRST), [0], 2) == [1, 2, 3]
        assert store.withdraw(ShardId(5, 1, 3, FIRST), [1], 4) == [1]
        assert not any(f"{step_dir(1)}." in name for name in self.everything())

        def meanwhile(nbytes: int) -> None:
            assert store.withdraw(ShardId(5, 1, 3, FIRST), [1], 2) == [3]

        store.write_shard(receipt, memoryview(data), meanwhile)
        write(store, 2, 0, 3)
        assert store.publish(receipt.stamp) and steps(store) == [2]
        self.assert_sound()

    @pytest.mark.parametrize("withdraws_first", [False, True])
    def test_a_part_that_is_withdrawn_while_the_last_one_comes_leaves_no_hole(
        self, monkeypatch: pytest.MonkeyPatch, withdraws_first: bool
    ) -> None:
        """At each moment between two requests of one of the two, the other does all of its work."""
        place, early, seen = self.root, ShardId(1, 0, 2, FIRST), set()
        for number in count():
            self.root = f"{place}/run-{number}"
            for step, rank in ((1, 0), (2, 0), (3, 0), (1, 1), (3, 1)):
                write(self.open(), step, rank, 2)
            done: list[bool] = []
            gone: list[int] = []
            works = [
                lambda gone=gone: gone.extend(self.open().withdraw(early, [0], 2)),
                lambda done=done: done.append(self.open().publish(early)),
            ]
            first, second = works if withdraws_first else reversed(works)
            with monkeypatch.context() as patch:
                met = before_call(number, Bucket, ("get", "put", "list", "walk", "create", "delete"), second, patch)
                first()
            self.assert_sound()
            assert steps(self.open()) == [1] * (done == [True]) and not (gone and done == [True])
            assert gone or self.open().publish(early), "all parts are there"
            self.assert_sound()
            seen.add(bool(gone))
            if not met():
                break
        assert seen == {False, True} and number > 2

    @pytest.mark.campaign(seconds=12)
    @pytest.mark.parametrize("tidies_first", [False, True])
    def test_whoever_publishes_while_another_tidies_shows_only_what_is_whole(
        self, monkeypatch: pytest.MonkeyPatch, tidies_first: bool
    ) -> None:
        """At each moment between two requests of one of the two, the other does all of its work."""
        place = self.root
        for number in count():
            self.root = f"{place}/run-{number}"
            late = write(self.open(), 1)
            save(self.open(), 2)
            works = [partial(tidy, self.open()), partial(self.open().publish, late)]
            first, second = works if tidies_first else reversed(works)
            with monkeypatch.context() as patch:
                met = before_call(number, Bucket, ("list", "walk", "create", "delete"), second, patch)
                first()
            self.assert_sound()
            tidy(self.open())
            self.assert_sound()
            assert steps(self.open()) == [2]
            if not met():
                break
        assert number > 2


AZURITE = os.environ.get("REKINDLE_TEST_AZURITE")
"""Its address, as in http://127.0.0.1:10000. It comes from npm: ``azurite-blob --skipApiVersionCheck``."""
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The one that every Azurite has."""


class TestAzure(StoreContract):
    __test__ = AZURITE is not None
    points = ("drain.copying", "drain.shard", "drain.published", "drain.prune")

    @pytest.fixture(autouse=True)
    def place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        blob = pytest.importorskip("azure.storage.blob")
        endpoint = f"{AZURITE}/{ACCOUNT}"
        name = f"container-{secrets.token_hex(4)}"
        self.container = blob.BlobServiceClient(endpoint, ACCOUNT_KEY).create_container(name)
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", ACCOUNT_KEY)
        monkeypatch.setenv("AZURE_ENDPOINT", endpoint)
        self.root = f"az://{name}/run"

    def everything(self) -> set[str]:
        return {blob.name for blob in self.container.list_blobs(name_starts_with="run/")}

    def damage(self, step: int) -> None:
        blob = self.container.get_blob_client(f"run/{step_dir(step)}.json")
        data = bytearray(blob.download_blob().readall())
        data[-2] ^= 1
        blob.upload_blob(bytes(data), overwrite=True)

    def test_conditions_are_kept(self) -> None:
        assert self.open().capability_warning() is None
