"""Describes errors of the operating system, and says what to do about them: the second half of every alarm."""

from __future__ import annotations

import errno
import os

__all__ = ["describe_error", "explain"]

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
    errno.ENOTDIR: "there is a file where a directory should be: see that the path is right",
    errno.EISDIR: "there is a directory where a file should be: remove it",
    errno.EEXIST: "see that the path is right, and that no other job writes there",
    errno.ESTALE: "mount it again",
    errno.ENOTCONN: "mount it again",
    errno.ELOOP: "mend the links that lead there",
    errno.ETIMEDOUT: "see that its server answers",
    errno.EHOSTUNREACH: "see that its server answers, and that the bucket is there",
    errno.ENAMETOOLONG: "choose a shorter path",
}
_ROLE = "/latest/"
"""Part of the URL that an S3 client requests from the machine when it has no keys."""


def describe_error(error: BaseException) -> str:
    """Returns one line: what is wrong, and what to do about it."""
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    what = error.strerror or os.strerror(error.errno)
    refused = error.errno in (errno.EACCES, errno.EPERM) or _ROLE in what
    if refused and "://" in str(error.filename):
        return f"{what}: {_access(str(error.filename))}"
    return f"{what}: {_ADVICE.get(error.errno, 'see that it can be read and written')}"


def explain(error: BaseException) -> str:
    """Returns ``describe_error`` after the name of the file that the error is about."""
    where = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
    return where + describe_error(error)


def _access(url: str) -> str:
    if url.startswith("s3://") and "AWS_ACCESS_KEY_ID" not in os.environ:
        return (
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give this machine a role that may read and write there"
        )
    return "see that the credentials in the environment are right, and may read and write there"
