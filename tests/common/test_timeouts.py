"""No wait is without a bound, and what storage itself answers is not taken for silence."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import cast

import pytest

from rekindle.common.timeouts import with_timeout
from rekindle.errors import NotDurableError
from rekindle.format.lineage import Incarnation, ShardId
from rekindle.session.finish import wait_durable
from rekindle.storage.store import Store

STAMP = ShardId(3, 0, 1, Incarnation(1, "a" * 16))


class TimedOut:
    """A store on a soft NFS mount whose server is away: each call fails, and at once."""

    poll = 0.01

    def durable(self, stamp: ShardId) -> bool:
        raise OSError(errno.ETIMEDOUT, "Connection timed out", "/mnt/x")

    has_shard = durable


def test_work_that_hangs_is_given_up_by_name() -> None:
    free = threading.Event()
    with pytest.raises(TimeoutError, match=r"does not answer within 0 s.*/mnt/x"):
        with_timeout(0.1, "/mnt/x", free.wait)
    free.set()
    assert with_timeout(60.0, Path("/mnt/x"), lambda: 5) == 5


def test_a_time_out_of_the_work_itself_is_told_as_it_is() -> None:
    with pytest.raises(OSError, match="Connection timed out: '/mnt/x'"):
        with_timeout(120.0, "/mnt/x", lambda: TimedOut().durable(STAMP))


def test_storage_that_answers_with_a_time_out_is_not_called_slow() -> None:
    with pytest.raises(NotDurableError, match="Connection timed out"):
        wait_durable(STAMP, cast(Store, TimedOut()), None, None, 0.0)
