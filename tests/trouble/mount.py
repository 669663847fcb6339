"""``python -m tests.trouble.mount BACKING MOUNTPOINT CONTROL``: a file system in user space that can be in trouble.

It passes all on to BACKING. While CONTROL says ``slow`` each write takes 50 ms, with ``eio`` writes and syncs fail,
with ``halves`` writes do half of what they are asked. Stopped by a signal it hangs.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from typing import Any

import fuse


class Troubled(fuse.Operations):  # type: ignore[misc]
    def __init__(self, backing: Path, control: Path) -> None:
        self._backing, self._control = str(backing), control

    def _says(self) -> str:
        try:
            return self._control.read_text().strip()
        except OSError:
            return ""

    def _real(self, path: str) -> str:
        return self._backing + path

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        info = os.lstat(self._real(path))
        names = ("st_atime", "st_ctime", "st_gid", "st_mode", "st_mtime", "st_nlink", "st_size", "st_uid", "st_blocks")
        return {name: getattr(info, name) for name in names}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._real(path))]

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self._real(path), mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(self._real(path))

    def unlink(self, path: str) -> None:
        os.unlink(self._real(path))

    def rename(self, old: str, new: str) -> None:
        os.rename(self._real(old), self._real(new))

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return os.open(self._real(path), os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode)

    def open(self, path: str, flags: int) -> int:
        return os.open(self._real(path), flags & ~getattr(os, "O_DIRECT", 0))

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        says = self._says()
        if says == "eio":
            raise fuse.FuseOSError(errno.EIO)
        if says == "slow":
            time.sleep(0.05)
        if says == "halves" and len(data) > 1:
            data = data[: len(data) // 2]
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        os.truncate(self._real(path), length)

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        if self._says() == "eio":
            raise fuse.FuseOSError(errno.EIO)
        os.fsync(fh)

    def release(self, path: str, fh: int) -> None:
        os.close(fh)


if __name__ == "__main__":
    fuse.FUSE(
        Troubled(Path(sys.argv[1]), Path(sys.argv[3])),
        *(sys.argv[2],),
        **{"foreground": True, "nothreads": False, "big_writes": True},
    )
