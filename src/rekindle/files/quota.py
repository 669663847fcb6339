"""Bounds the memory of the files below one directory or URL."""

from __future__ import annotations

from rekindle.errors import FormatError, MemoryStoreError
from rekindle.files.settings import RootSettings
from rekindle.memory.files_dir import FilesDir
from rekindle.memory.kept import KeptFile, key_of

__all__ = ["Quota"]


class Quota:
    """Keeps the files in memory within the limits of their roots. To be used under the lock of the store."""

    def __init__(self, store: FilesDir, roots: tuple[RootSettings, ...]) -> None:
        self._store = store
        self._roots = [root for root in roots if root.limit is not None]
        self._known: dict[KeptFile, tuple[str, int]] = {}
        """Target and size of the files in memory: a receipt is read once."""

    def make_room(self, target: str, nbytes: int) -> None:
        """Gives up files that storage has, the oldest first, until ``nbytes`` at ``target`` fit in with its roots.

        The file that is there already doesn't count, as the new one supersedes it. Raises MemoryStoreError where they
        don't fit.
        """
        roots = [root for root in self._roots if root.holds(target)]
        if not roots:
            return
        files = self._others(target)
        for root in roots:
            inside = {file: size for file, (other, size) in files.items() if root.holds(other)}
            may_go = [file for file in inside if file.is_stored()]
            held = sum(inside.values())
            stays = held - sum(inside[file] for file in may_go)
            limit = root.limit or 0
            if stays + nbytes > limit:
                raise MemoryStoreError(
                    f"memory store {self._store.path}: {nbytes:,} bytes more than the {stays:,} of files below "
                    f"{root.root} that storage lacks would exceed their limit of {limit:,}: see 'rekindle ls --files', "
                    f"or raise the limit of rekindle.files.configure({root.root!r})"
                )
            if held + nbytes > limit:
                self._store.kept.remove_superseded()
            for file in may_go:
                if held + nbytes <= limit:
                    break
                held -= files.pop(file)[1]
                self._store.kept.remove(file)

    def _others(self, target: str) -> dict[KeptFile, tuple[str, int]]:
        """Maps the newest files of all other targets, in the order of their saves, to their targets and sizes."""
        files = self._store.kept.newest()
        self._known = {file: known for file in files if (known := self._known.get(file) or _described(file))}
        return {file: known for file, known in self._known.items() if file.key != key_of(target)}


def _described(file: KeptFile) -> tuple[str, int] | None:
    try:
        receipt = file.read_receipt()
    except (OSError, FormatError):  # a damaged one belongs to no root that is known
        return None
    return receipt.target, receipt.nbytes
