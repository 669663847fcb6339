"""Sees a save to where its caller wants it: to memory, other nodes, storage. Pins it there, and notes its metric."""

from __future__ import annotations

from rekindle.errors import NotDurableError
from rekindle.format.lineage import ShardId
from rekindle.format.metric import Metric
from rekindle.save.noting import note_metric
from rekindle.save.pinning import pin_saved
from rekindle.save.saver import Saver
from rekindle.session.node_safe import wait_node_safe

__all__ = ["see_to"]


def see_to(
    saver: Saver,
    n: int,
    base: ShardId | None,
    *,
    wait: str | None,
    pin: bool,
    metric: Metric | None,
    timeout: float,
) -> None:
    """Do for step ``n``, which was just saved, what the arguments of ``Checkpointer.save`` ask for beyond the save.

    ``base`` is the checkpoint that was restored. Raises NotDurableError when the step isn't there in time.
    """
    if wait is not None:
        saver.secure(timeout)
    stamp = saver.newest or base
    if stamp is None or stamp.step != n:
        if wait is not None:
            raise NotDurableError(f"step {n} is not saved: see the log for why")
        return
    if wait == "node" and saver.newest is not None:  # else storage has it, from where it was restored
        with saver.pause("waiting for other nodes"):
            wait_node_safe(saver.session, saver.newest, timeout)
    if wait == "durable":
        saver.wait_durable(stamp, timeout)
    if pin:
        pin_saved(saver, stamp, durable=wait == "durable", timeout=timeout)
    if metric is not None and stamp.metric != metric:
        note_metric(saver, stamp, metric, durable=wait == "durable")
