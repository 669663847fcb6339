"""Reads and writes objects by name, in S3, Google Cloud Storage or Azure: the only module that knows obstore.

Turns obstore's errors into OSErrors. Every wait is bounded: obstore retries what may succeed, and gives up.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from rekindle.errors import UsageError

try:
    import obstore
    from obstore import exceptions, store
except ImportError as failure:
    raise UsageError(
        f"checkpoints in an object store need the package 'obstore': pip install obstore ({failure})"
    ) from failure

if TYPE_CHECKING:
    from obstore import UpdateVersion

__all__ = ["Bucket", "Object", "in_parallel"]

_A = TypeVar("_A")
_B = TypeVar("_B")

_CHUNK = 1 << 20
"""Bytes of a piece of a download. Small, so that a piece is hashed and put in place while the next ones arrive."""
_PART = 16 << 20
"""Fewest bytes of an upload's part."""
_PARTS = 9000
"""Most parts of an upload: S3 has a limit of 10,000."""
_IN_FLIGHT = 128 << 20
"""Bytes of all parts that are under way at a time. They are sent from the caller's memory, without a copy."""
_SHORT, _SHORT_IN_ALL = timedelta(seconds=10), timedelta(seconds=20)
"""Timeout of a small request, and the time after which it is not retried."""
_LONG, _LONG_IN_ALL = timedelta(seconds=120), timedelta(seconds=180)
"""Timeout of an upload's part or a shard's range, and the time after which it is not retried. 16 MiB, eight at a time,
need more than 1.1 MB/s."""
_REQUESTS = 8
"""Requests for small objects that are made at a time."""
_TRIES = 4
"""Retries of a request within that time."""
_CODE = re.compile(r"<Code>(\w{1,40})</Code>")


@dataclass(frozen=True)
class Object:
    """An object as it was when it was listed or read."""

    name: str
    size: int
    etag: str | None
    version: str | None
    changed: float
    """Time of the last change by the service's clock, in seconds since 1970."""


class Bucket:
    """The objects whose names begin with ``url``, by the rest of their names. Thread-safe.

    Credentials and endpoints come from the environment. Raises UsageError when they are malformed.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.scheme, _, rest = url.partition("://")
        self.bucket, _, self.prefix = rest.partition("/")
        self._quick = self._client(_SHORT, _SHORT_IN_ALL)
        self._bulk = self._client(_LONG, _LONG_IN_ALL)

    def _client(self, timeout: timedelta, in_all: timedelta) -> Any:
        kind: Any = {"s3": store.S3Store, "gs": store.GCSStore, "az": store.AzureStore}[self.scheme]
        # An endpoint given with http:// is meant to be one; all others are https:// by default.
        options = {"timeout": timeout, "connect_timeout": timedelta(seconds=5), "allow_http": True}
        retries = {"max_retries": _TRIES, "retry_timeout": in_all}
        try:
            return kind(self.bucket, prefix=self.prefix or None, client_options=options, retry_config=retries)
        except (exceptions.BaseError, ValueError) as error:
            more = ": set AZURE_STORAGE_ACCOUNT_NAME" if "Account must be specified" in str(error) else ""
            raise UsageError(f"{self.url}: {_sentence(error)}{more}") from error

    # -- reading ------------------------------------------------------------------------------------------------

    def get(self, name: str) -> tuple[bytes, Object]:
        """Reads a small object. Raises FileNotFoundError."""
        with self._translated(name):
            found = obstore.get(self._quick, name)
            return bytes(found.bytes()), _object(found.meta)

    def head(self, name: str) -> Object:
        """Returns an object's size and tags. Raises FileNotFoundError."""
        with self._translated(name):
            return _object(obstore.head(self._quick, name))

    def stream(self, name: str, start: int, stop: int) -> Iterator[memoryview]:
        """Yields a range's bytes as they arrive; fewer where the object ends before ``stop``."""
        with self._translated(name):
            for chunk in obstore.get(self._bulk, name, options={"range": (start, stop)}).stream(min_chunk_size=_CHUNK):
                yield memoryview(chunk)

    def list(self) -> Sequence[Object]:
        """Lists the objects at the top: those without a slash in the rest of their names."""
        with self._translated(""):
            return [_object(meta) for meta in obstore.list_with_delimiter(self._quick)["objects"]]

    def directories(self) -> Sequence[str]:
        """Lists the first parts of the names that have a slash in them: one request for a thousand."""
        with self._translated(""):
            found = obstore.list_with_delimiter(self._quick)["common_prefixes"]
        return [name.rstrip("/").rpartition("/")[2] for name in found]

    def walk(self, directory: str | None = None) -> Sequence[Object]:
        """Lists all objects, or those in a directory: one request for a thousand."""
        with self._translated(directory or ""):
            return [_object(meta) for batch in obstore.list(self._quick, directory) for meta in batch]

    # -- writing ------------------------------------------------------------------------------------------------

    def put(self, name: str, data: bytes) -> None:
        """Writes a small object, over an older one if there is one."""
        with self._translated(name):
            obstore.put(self._quick, name, data, use_multipart=False)

    def create(self, name: str, data: bytes) -> None:
        """Writes an object that isn't there yet. Raises FileExistsError when it is.

        Raises NotImplementedError where the service has no conditional writes.
        """
        with self._translated(name, conditional=True):
            obstore.put(self._quick, name, data, mode="create")

    def replace(self, seen: Object, data: bytes) -> None:
        """Writes over an object if it is still as it was ``seen``; else raises FileExistsError.

        Raises NotImplementedError where the service has no conditional writes.
        """
        version: UpdateVersion = {} if seen.version is None else {"version": seen.version}
        tag = seen.etag or ""
        for spelt in (tag, tag.strip('"')):  # radosgw 16 matches tags without quotes only
            try:
                with self._translated(seen.name, conditional=True):
                    obstore.put(self._quick, seen.name, data, mode={"e_tag": spelt, **version})
                return
            except FileExistsError as error:
                refused = error
        raise refused

    def upload(self, name: str, pieces: Iterator[memoryview], nbytes: int, whole: memoryview) -> None:
        """Sends ``pieces``, which together are the ``nbytes`` of ``whole``: several parts at once, without a copy.

        Each part goes with its SHA-256, which services check. An error of ``pieces`` is raised, and no object is left.
        """
        if nbytes <= _PART:
            for _ in pieces:
                pass
            with self._translated(name):
                obstore.put(self._bulk, name, whole[:nbytes], use_multipart=False)
            return
        part = max(_PART, -(-nbytes // _PARTS) + _CHUNK - 1 & -_CHUNK)
        in_flight = max(2, _IN_FLIGHT // part)
        with self._translated(name):
            obstore.put(self._bulk, name, pieces, use_multipart=True, chunk_size=part, max_concurrency=in_flight)

    def delete(self, names: Sequence[str]) -> None:
        """Removes objects. One that isn't there is no error."""
        try:
            if names:
                with self._translated(names[0]):
                    obstore.delete(self._quick, list(names))
        except FileNotFoundError:
            for name in names if len(names) > 1 else ():
                self.delete([name])

    # -- errors -------------------------------------------------------------------------------------------------

    @contextmanager
    def _translated(self, name: str, *, conditional: bool = False) -> Iterator[None]:
        """Turns obstore's errors into those of the operating system, with the object's URL."""
        where = f"{self.url}/{name}" if name else self.url
        try:
            yield
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, "is not there", where) from error
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
            raise FileExistsError(errno.EEXIST, "has been written by somebody else", where) from error
        except exceptions.BaseError as error:
            denied = isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError)
            if denied or "403 Forbidden" in str(error):  # obstore has no type for a listing's
                raise PermissionError(errno.EACCES, _sentence(error), where) from error
            if conditional and (isinstance(error, exceptions.NotSupportedError) or "501 Not Implemented" in str(error)):
                raise NotImplementedError(_sentence(error)) from error
            raise OSError(errno.EHOSTUNREACH, _sentence(error), where) from error


def _object(meta: Any) -> Object:
    return Object(meta["path"], meta["size"], meta["e_tag"], meta["version"], meta["last_modified"].timestamp())


def _sentence(error: BaseException) -> str:
    """Returns an error's text and code in one line, without the structures and documents that obstore adds."""
    if "<Code>NoSuchBucket</Code>" in str(error):
        return "there is no such bucket"
    code = _CODE.search(str(error))
    return str(error).partition("\n")[0].partition(": <?xml")[0][:400] + (f" ({code[1]})" if code else "")


def in_parallel(ask: Callable[[_A], _B | None], todo: list[_A]) -> list[_B]:
    """Calls ``ask`` for each, several at a time. Returns the answers in order, without those that are None."""
    if len(todo) < 2:
        answers = [ask(one) for one in todo]
    else:
        with ThreadPoolExecutor(_REQUESTS, thread_name_prefix="rekindle-ask") as pool:
            answers = list(pool.map(ask, todo))
    return [answer for answer in answers if answer is not None]
