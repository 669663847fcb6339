"""Stores checkpoints in an object store, which has no rename: a checkpoint becomes visible with its manifest.

Shards and receipts of a step lie under ``step-N.<incarnation>/``, so those of different incarnations never meet. The
manifest is ``step-N.json``. It is written last, and only if no other process has written it meanwhile: of two jobs on
one root one wins each step, and the other gets an error. See docs/format.md and decision 14.
"""

from __future__ import annotations

import errno
import logging
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from rekindle.common.failpoints import reach
from rekindle.errors import CorruptError, FormatError
from rekindle.format.lineage import ShardId, drop_superseded
from rekindle.format.metric import Metric
from rekindle.format.names import CLAIMS, PINNED, parse_shard_name, receipt_name, shard_name, step_dir
from rekindle.format.receipt import Receipt
from rekindle.memory.notes import RootIdentity
from rekindle.storage.bucket import Bucket, Object, in_parallel
from rekindle.storage.claims import newest_claim
from rekindle.storage.copy import verified_pieces
from rekindle.storage.manifest import Head, build_manifest, read_head, with_metric
from rekindle.storage.object_files import StepObjects
from rekindle.storage.retention import surplus_parts
from rekindle.storage.store import Contents, Published, Store, unread_entry
from rekindle.storage.throttle import Budget
from rekindle.storage.uploads import abort_upload, list_unfinished

__all__ = ["ObjectStore", "urls_below"]

log = logging.getLogger("rekindle")

_RACES = 5
"""Attempts at writing a manifest while others write it, too."""
_REMOVED_WITHIN = 300.0
"""Seconds after a pin, by the service's clock, within which clean-up leaves a pinned step without a manifest alone. Who
removes it may live, and have looked for a pin before it came: then that pin is just being refused. Its last requests
take at most 20 s each."""

_STEP = re.compile(r"step-(\d{10})\.json\Z")
_SHARDS = re.compile(r"step-(\d{10})\.([0-9a-f]{16})\Z")
_PIN = re.compile(rf"step-\d{{10}}\.[0-9a-f]{{16}}\.{PINNED}\Z")
_DAMAGED = re.compile(r"step-(\d{10})\.[0-9a-f]{16}\.damaged\Z")


@dataclass(frozen=True)
class _Manifest:
    """``step-N.json`` as it was last read. ``head`` is None when it is malformed or could not be read."""

    object: Object
    step: int
    head: Head | None
    error: OSError | None = None

    @property
    def stamp(self) -> ShardId | None:
        return None if self.head is None else self.head.stamp


class ObjectStore(Store):
    """The checkpoints under one URL. Remembers manifests by their tags, so that they are read once."""

    poll = 0.5

    def __init__(self, root: str) -> None:
        self.root: str = root
        self.bucket = Bucket(root)
        self._known: dict[tuple[str, str | None], Head | None] = {}
        """Heads of manifests by name and tag. Replaced as a whole, so that threads need no lock."""

    # -- reading ------------------------------------------------------------------------------------------------

    def contents(self) -> Contents:
        objects = self.bucket.list()
        manifests, names = self._list_manifests(objects), {o.name for o in objects}
        heads = [m.head for m in manifests if m.head is not None]
        return Contents(
            [
                Published(h.stamp, self._files(h.stamp), h.saved_at, _pin_name(h.stamp) in names, h.nbytes)
                for h in heads
            ],
            [(m.step, StepObjects(self.bucket, m.step, m.object.name)) for m in manifests if m.stamp is None],
            [unread_entry(m.step, f"{self.root}/{m.object.name}", m.error) for m in manifests if m.error is not None],
        )

    def durable(self, stamp: ShardId) -> bool:
        found = self._manifest_of(stamp.step)
        return found is not None and found.stamp is not None and found.stamp.checkpoint == stamp.checkpoint

    def _files(self, stamp: ShardId) -> StepObjects:
        return StepObjects(self.bucket, stamp.step, _directory(stamp))

    def _list_manifests(self, objects: Iterable[Object] | None = None) -> list[_Manifest]:
        """Returns all manifests by step: one listing, unless it is given, and a request for each unread one."""
        listed = [o for o in (self.bucket.list() if objects is None else objects) if _STEP.match(o.name)]
        # A tag changes with the content, so a head that is known by name and tag need not be read again.
        known = self._known
        found = [_Manifest(o, _step(o.name), known[o.name, o.etag]) for o in listed if (o.name, o.etag) in known]
        found += in_parallel(self._try_to_read, [o for o in listed if (o.name, o.etag) not in known])
        errors = [m.error for m in found if m.error is not None]
        if errors and all(m.stamp is None for m in found):
            raise errors[0]
        read = [m for m in found if m.error is None and m.object.etag is not None]
        self._known = {(m.object.name, m.object.etag): m.head for m in read}
        return sorted(found, key=lambda m: m.step)

    def _try_to_read(self, listed: Object) -> _Manifest | None:
        try:
            return self._read_manifest(listed.name)
        except OSError as error:
            return _Manifest(listed, _step(listed.name), None, error)

    def _manifest_of(self, step: int) -> _Manifest | None:
        return self._read_manifest(f"{step_dir(step)}.json")

    def _read_manifest(self, name: str) -> _Manifest | None:
        """Reads a manifest; None when there is none."""
        try:
            data, found = self.bucket.get(name)
        except FileNotFoundError:
            return None
        try:
            head = read_head(data, name)
            sound = head.stamp.step == _step(name) and _SHARDS.match(_directory(head.stamp))
        except FormatError:
            sound = None
        return _Manifest(found, _step(name), head if sound else None)

    def was_deleted(self, trace: RootIdentity | None) -> bool:
        """Returns True: a bucket that answers shows all that it has."""
        return True

    # -- writing ------------------------------------------------------------------------------------------------

    def has_shard(self, stamp: ShardId) -> bool:
        return self._files(stamp).exists(receipt_name(stamp.rank, stamp.world))

    def write_shard(
        self,
        receipt: Receipt,
        source: memoryview,
        progress: Callable[[int], object],
        budget: Budget | None = None,
    ) -> None:
        """Sends parts from ``source`` itself. ``progress`` counts bytes on their way, in the caller's thread."""
        stamp = receipt.stamp
        directory = _directory(stamp)
        reach("drain.started", stamp.step)
        name = f"{directory}/{shard_name(stamp.rank, stamp.world)}"
        if stamp.world > 1:  # nobody sees an upload before its end: other nodes are told that this rank has begun
            with suppress(FileExistsError, NotImplementedError):
                self.bucket.create(name, b"")
        pieces = _count_pieces(receipt, source, progress, budget or Budget())
        self.bucket.upload(name, pieces, receipt.file_bytes, source)
        reach("drain.shard", stamp.step)
        self.bucket.put(f"{directory}/{receipt_name(stamp.rank, stamp.world)}", receipt.raw)
        reach("drain.receipt", stamp.step)

    def discard(self, stamp: ShardId) -> None:
        if not self.durable(stamp):
            self._remove_shards(_directory(stamp))
            self._withdraw(_directory(stamp))

    def make_room(self, stamp: ShardId) -> None:
        """Removes nothing: a bucket always has room, and a finished shard need not be sent again."""

    def publish(self, stamp: ShardId, before: Callable[[], object] = lambda: None) -> bool:
        found = self._manifest_of(stamp.step)
        if found is not None and found.stamp is not None and found.stamp.checkpoint == stamp.checkpoint:
            return True
        if not self._whole(stamp):
            return self.durable(stamp)  # others may have published it and cleaned up since it was read
        names = [receipt_name(rank, stamp.world) for rank in range(stamp.world)]
        receipts = in_parallel(partial(self._receipt, self._files(stamp)), names)
        if len(receipts) < len(names):
            return self.durable(stamp)
        document = build_manifest(receipts, stamp)
        if any(receipt.stamp.pinned for receipt in receipts):
            self.bucket.put(_pin_name(stamp), b"")
        before()
        self._write_manifest(stamp, found, document)
        reach("drain.manifest", stamp.step)
        if not self._kept(stamp):
            return False
        reach("drain.published", stamp.step)
        return True

    def _whole(self, stamp: ShardId) -> bool:
        """True if the shards and receipts of all ranks are there."""
        directory, ranks = _directory(stamp), range(stamp.world)
        there = {o.name for o in self.bucket.walk(directory) if o.size}  # a shard that was begun is empty
        names = [name(rank, stamp.world) for name in (receipt_name, shard_name) for rank in ranks]
        return there.issuperset(f"{directory}/{name}" for name in names)

    def _kept(self, stamp: ShardId) -> bool:
        """Withdraws the manifest just written if shards are gone: who cleaned up may have looked for it before."""
        if self._whole(stamp):
            return True
        self._withdraw(_directory(stamp))
        return False

    def _withdraw(self, directory: str) -> None:
        """Removes the manifest that names shards in ``directory``, if there is one: they are gone."""
        found = self._manifest_of(_step(directory))
        if found is not None and found.stamp is not None and _directory(found.stamp) == directory:
            self.bucket.delete([found.object.name])

    @staticmethod
    def _receipt(files: StepObjects, name: str) -> Receipt | None:
        try:
            return Receipt.decode(files.read(name), files.named(name))
        except FileNotFoundError:
            return None

    def _write_manifest(self, stamp: ShardId, found: _Manifest | None, document: bytes) -> None:
        """Writes a manifest in place of the one ``found``, or of one that an older start of the job wrote meanwhile."""
        name = f"{step_dir(stamp.step)}.json"
        for _ in range(_RACES):
            if found is not None and found.stamp is not None:
                other = found.stamp
                if other.checkpoint == stamp.checkpoint:
                    return
                if other.incarnation.generation >= stamp.incarnation.generation:
                    raise self._step_taken(stamp, other)
            elif found is not None:  # damaged: keep a copy, as a person may still want its shards
                self.bucket.put(f"{step_dir(stamp.step)}.{secrets.token_hex(8)}.damaged", self.bucket.get(name)[0])
            try:
                if found is None:
                    self.bucket.create(name, document)
                else:
                    reach("drain.aside", stamp.step)
                    self.bucket.replace(found.object, document)
                return
            except NotImplementedError:  # capability_warning has told the job at its start
                self.bucket.put(name, document)
                return
            except FileExistsError:
                found = self._manifest_of(stamp.step)
        raise OSError(errno.EAGAIN, "other processes keep writing it", f"{self.root}/{name}")

    def _step_taken(self, stamp: ShardId, other: ShardId) -> FileExistsError:
        why = (
            f"step {stamp.step} has been saved there by another start of the job, {other.incarnation.id} of generation "
            f"{other.incarnation.generation}: only one job at a time can use a root. Nothing is lost: this node's "
            "memory still holds it"
        )
        return FileExistsError(errno.EEXIST, why, f"{self.root}/{step_dir(stamp.step)}.json")

    def withdraw(self, stamp: ShardId, ranks: Collection[int], keep: int, spared: Collection[int] = ()) -> list[int]:
        names = {o.name for o in self.bucket.walk()}
        begun: dict[int, set[int]] = {}
        for directory, _, file in (name.partition("/") for name in names):
            match, part = _SHARDS.match(directory), parse_shard_name(file)
            if match and part and match[2] == stamp.incarnation.id and f"{directory[:15]}.json" not in names:
                begun.setdefault(int(match[1]), set()).add(part[0])
        surplus = surplus_parts(begun, ranks, keep, spared)
        return [step for step in surplus if self._withdraw_parts(replace(stamp, step=step), ranks)]

    def _withdraw_parts(self, stamp: ShardId, ranks: Collection[int]) -> bool:
        """Removes the parts of ``ranks`` in an unfinished step. Returns False if it has become durable meanwhile.

        The receipts go before the last look: who publishes looks for them after it has written the manifest.
        """
        receipts = {}
        for rank in ranks:
            name = f"{_directory(stamp)}/{receipt_name(rank, stamp.world)}"
            with suppress(FileNotFoundError):
                receipts[name] = self.bucket.get(name)[0]
        self.bucket.delete(list(receipts))
        if self.durable(stamp):
            for name, data in receipts.items():
                self.bucket.put(name, data)
            return False
        self.bucket.delete([f"{_directory(stamp)}/{shard_name(rank, stamp.world)}" for rank in ranks])
        return True

    # -- tidying ------------------------------------------------------------------------------------------------

    def clean_up(self) -> None:
        objects = self.bucket.walk()
        manifests = self._list_manifests([o for o in objects if "/" not in o.name])
        stamps = [m.stamp for m in manifests if m.stamp is not None]
        newest = max((stamp.step for stamp in drop_superseded(stamps)), default=-1)
        starts = {stamp.incarnation.id for stamp in stamps}
        all_read = all(m.error is None for m in manifests)
        used = {_directory(stamp) for stamp in stamps}
        listed, now = {m.step for m in manifests}, max((o.changed for o in objects), default=0.0)
        for pin in (o for o in objects if o.size and _PIN.match(o.name) and _step(o.name) not in listed):
            if now - pin.changed < _REMOVED_WITHIN or self._list_pinned(pin.name):
                used.add(pin.name.removesuffix(f".{PINNED}"))
        damaged = [_DAMAGED.match(o.name) for o in objects]
        spared = {m.step for m in manifests if m.stamp is None} | {int(match[1]) for match in damaged if match}

        def superseded(directory: str) -> bool:
            # A start whose only manifest can't be read may still be writing its next step.
            match = _SHARDS.match(directory)
            return match is not None and int(match[1]) <= newest and (match[2] in starts or all_read)

        def useless(name: str) -> bool:
            directory, _, file = name.partition("/")
            ours = parse_shard_name(file) is not None and superseded(directory)
            return ours and directory not in used and _step(directory) not in spared

        surplus = [o.name for o in objects if useless(o.name)]
        self.bucket.delete(surplus)
        for directory in {name.partition("/")[0] for name in surplus}:
            self._withdraw(directory)  # a publisher that had read the receipts before may have come meanwhile
        if self.bucket.scheme == "s3":
            self._abort_uploads(superseded)

    def _abort_uploads(self, superseded: Callable[[str], bool]) -> None:
        """Removes the parts that killed drains left; none that a live drain may still be sending."""
        prefix = f"{self.bucket.prefix}/" if self.bucket.prefix else ""
        for key, upload in list(list_unfinished(self.bucket.bucket, f"{prefix}step-")):
            if superseded(key.removeprefix(prefix).partition("/")[0]):
                abort_upload(self.bucket.bucket, key, upload)

    def prune(self, keep: int | None, keep_every: int | None, *, keep_best: bool = True) -> list[int]:
        surplus = self.surplus(keep, keep_every, keep_best=keep_best)
        return [entry.stamp.step for entry in surplus if self._remove(entry.stamp)]

    def _remove(self, stamp: ShardId) -> bool:
        """Removes a checkpoint. Returns False if it is pinned or gone by now, or a later start published that step."""
        if self._pinned(stamp):
            return False
        try:
            document, manifest = self._document(stamp)
        except FileNotFoundError:  # another process has removed it since the look, or a later start's is there
            return False
        self.bucket.delete([manifest.name])
        self._publish_later(stamp)
        if self._pinned(stamp):  # since the look before: who told it may have seen the manifest behind it
            with suppress(FileExistsError):
                self.write_extra(manifest.name, document, exclusive=True)
            return False
        reach("drain.prune", stamp.step)
        self._remove_shards(_directory(stamp))
        self._withdraw(_directory(stamp))
        return True

    def _publish_later(self, removed: ShardId) -> None:
        """Publishes the step of ``removed`` for a start after it, whose manifest may have come just before the delete.

        Only for the one that has the newest claim: what one without it has been refused must not come to be listed.
        """
        for directory in self.bucket.directories():
            if not _SHARDS.match(directory) or _step(directory) != removed.step or directory == _directory(removed):
                continue
            with suppress(FileNotFoundError, FileExistsError, CorruptError):  # the last: they make up no whole
                later = self._stamp_in(directory)
                if later is not None and later.incarnation.generation > removed.incarnation.generation:
                    self.publish(later, partial(self._see_claim, later))

    def _stamp_in(self, directory: str) -> ShardId | None:
        """Returns the stamp of the first receipt there; None without one."""
        names = (o.name for o in self.bucket.walk(directory) if o.name.endswith(".json"))
        receipt = next((name for name in names if parse_shard_name(name.rpartition("/")[2])), None)
        return None if receipt is None else Receipt.decode(self.bucket.get(receipt)[0], receipt).stamp

    def _see_claim(self, stamp: ShardId) -> None:
        """Raises FileExistsError where another start than that of ``stamp`` has the newest claim."""
        claim = newest_claim(self)
        if claim is not None and claim.start != stamp.incarnation.id:
            raise FileExistsError(errno.EEXIST, "another start has claimed it", self.root)

    def pin(self, stamp: ShardId) -> None:
        """Keeps the manifest in the pin, too: see ``_list_pinned``."""
        self.bucket.put(_pin_name(stamp), self._document(stamp)[0])
        if not self.durable(stamp):  # it was surplus, and removed meanwhile
            self.bucket.delete([_pin_name(stamp)])
            raise self._no_checkpoint(stamp)

    def _list_pinned(self, pin: str) -> bool:
        """Lists a pinned checkpoint again whose manifest is gone: who removed it was killed before it saw the pin.

        Takes the manifest from the pin, so that only what was listed before is listed again. False without shards.
        """
        try:
            document = self.bucket.get(pin)[0]
            stamp = read_head(document, pin).stamp
            if _pin_name(stamp) != pin or not self._whole(stamp):
                return False
            self.write_extra(f"{step_dir(stamp.step)}.json", document, exclusive=True)
        except FileExistsError:  # who removed it lives, and has put it back
            return True
        except (FileNotFoundError, FormatError):
            return False
        return self._kept(stamp)

    def _pinned(self, stamp: ShardId) -> bool:
        try:
            self.bucket.head(_pin_name(stamp))
        except FileNotFoundError:
            return False
        return True

    def unpin(self, stamp: ShardId) -> None:
        self.bucket.delete([_pin_name(stamp)])

    def note_metric(self, stamp: ShardId, metric: Metric) -> None:
        document, manifest = self._document(stamp)
        document = with_metric(document, metric, manifest.name)
        try:
            self.bucket.replace(manifest, document)
        except NotImplementedError:  # capability_warning has told the job at its start
            self.bucket.put(manifest.name, document)

    def _document(self, stamp: ShardId) -> tuple[bytes, Object]:
        """Reads the manifest of a checkpoint. Raises FileNotFoundError where there is none, or another start's."""
        name = f"{step_dir(stamp.step)}.json"
        with suppress(FileNotFoundError, FormatError):
            data, found = self.bucket.get(name)
            if read_head(data, name).stamp.checkpoint == stamp.checkpoint:
                return data, found
        raise self._no_checkpoint(stamp)

    def _no_checkpoint(self, stamp: ShardId) -> FileNotFoundError:
        return FileNotFoundError(errno.ENOENT, f"there is no checkpoint of step {stamp.step}", self.root)

    def _remove_shards(self, directory: str) -> None:
        """Removes a step's shards and receipts. Foreign files are left alone."""
        names = [o.name for o in self.bucket.walk(directory)]
        self.bucket.delete([name for name in names if parse_shard_name(name.rpartition("/")[2])])

    def write_extra(self, name: str, data: bytes, *, exclusive: bool = False) -> None:
        """Writes over one that is there where the service has no conditional writes, as ``capability_warning`` says."""
        if exclusive:
            with suppress(NotImplementedError):
                self.bucket.create(name, data)
                return
        self.bucket.put(name, data)

    def take_away(self, name: str) -> None:
        self.bucket.delete([name])

    def extras(self, directory: str) -> list[str]:
        names = (found.name for found in self.bucket.walk(directory))
        return sorted(name for name in names if name.count("/") == directory.count("/") + 1)

    def read_extra(self, name: str, most: int) -> bytes:
        size = min(most, self.bucket.head(name).size)  # services refuse a range that begins at an object's end
        return b"".join(self.bucket.stream(name, 0, size)) if size else b""

    def check_writable(self) -> None:
        name = f".rekindle-{secrets.token_hex(8)}"
        self.bucket.put(name, b"")
        self.bucket.delete([name])

    def capability_warning(self) -> str | None:
        name = f".rekindle-{secrets.token_hex(8)}"
        consequence = (
            "if two jobs use this root by mistake, the last to write a step's manifest replaces the other's checkpoint "
            "without an error. Give each job a root of its own"
        )
        try:
            for _ in range(2):
                self.bucket.create(name, b"")
            return f"{self.root}: the server ignores conditional writes (If-None-Match): {consequence}"
        except FileExistsError:  # at the first call already, where its answer was lost and the request retried
            return None
        except NotImplementedError:
            return f"{self.root}: the server has no conditional writes (If-None-Match): {consequence}"
        finally:
            self.bucket.delete([name])


def _directory(stamp: ShardId) -> str:
    return f"{step_dir(stamp.step)}.{stamp.incarnation.id}"


def _pin_name(stamp: ShardId) -> str:
    """Returns the name of a checkpoint's pin: an object beside the manifests, so that their listing shows it."""
    return f"{_directory(stamp)}.{PINNED}"


def _step(name: str) -> int:
    return int(name[5:15])


def _count_pieces(
    receipt: Receipt, source: memoryview, progress: Callable[[int], object], budget: Budget
) -> Iterator[memoryview]:
    for piece, _ in verified_pieces(receipt, source, budget):
        yield piece
        progress(len(piece))
        reach("drain.copying", receipt.stamp.step)
    reach("drain.written", receipt.stamp.step)


def urls_below(store: ObjectStore) -> list[str]:
    """Lists the URLs one level below the root, without those of its own shards and claims. Raises OSError."""
    names = (name for name in store.bucket.directories() if name != CLAIMS and not _SHARDS.match(name))
    return [f"{store.root}/{name}" for name in names]
