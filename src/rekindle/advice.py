"""What to do about an error of the operating system: the second half of every alarm."""

from __future__ import annotations

import errno
import os

__all__ = ["advise"]

_ADVICE = {
    errno.ENOSPC: "make room there, or keep fewer checkpoints",
    errno.EDQUOT: "raise the quota there, or keep fewer checkpoints",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    errno.EIO: "look at the disk and the kernel's log",
    errno.EROFS: "mount it writable again",
    errno.EACCES: "give this user the right to read and write there",
    errno.EPERM: "give this user the right to read and write there",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the machine's limit of open files (fs.file-max)",
    errno.ENOMEM: "give the job more memory",
    errno.ENOENT: "see that it is mounted, and that nobody removes it",
    errno.ENOTDIR: "move away the file that is in its place",
    errno.EEXIST: "move away the file that is in its place",
    errno.ESTALE: "mount it again",
    errno.ENOTCONN: "mount it again",
    errno.ELOOP: "mend the links that lead there",
    errno.ETIMEDOUT: "see that its server answers",
    errno.EHOSTUNREACH: "see that its server answers, and that the bucket is there",
    errno.ENAMETOOLONG: "choose a shorter root",
}


def advise(error: BaseException) -> str:
    """One line: what is wrong, and what to do about it."""
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    what = error.strerror or os.strerror(error.errno)
    return f"{what}: {_ADVICE.get(error.errno, 'see that it can be read and written')}"
