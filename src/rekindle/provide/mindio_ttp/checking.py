"""Refuses arguments that can't be right, and tells of wishes that aren't met."""

from __future__ import annotations

from rekindle.errors import UsageError
from rekindle.provide.mindio_ttp.callbacks import say_once

__all__ = ["check_address", "check_rank", "refuse_repair"]

_MOST_RANKS = 100_000
_PORTS = (1024, 65535)


def check_rank(call: str, rank: int, world: int, *, least: int = 0) -> None:
    """Raises UsageError for a rank or a number of ranks that can't be."""
    whole = all(type(number) is int for number in (rank, world))
    if not whole or not 1 <= world <= _MOST_RANKS or not least <= rank < world:
        raise UsageError(f"{call}: rank {rank!r} of {world!r}: must be {least} to 1 less than 1 to {_MOST_RANKS} ranks")


def check_address(call: str, ip: str, port: int) -> None:
    """Raises UsageError for an address that the original refuses."""
    if not isinstance(ip, str) or not ip or ip == "0.0.0.0":
        raise UsageError(f"{call}: address {ip!r}: must be one of this job's hosts, not empty nor 0.0.0.0")
    if type(port) is not int or not _PORTS[0] <= port <= _PORTS[1]:
        raise UsageError(f"{call}: port {port!r}: must be {_PORTS[0]} to {_PORTS[1]}")


def refuse_repair(*, arf: bool, zit: bool, local_copy: bool) -> None:
    """Warns, once, of what is accepted and not done."""
    wanted = {"enable_arf": arf, "enable_zit": zit, "enable_local_copy": local_copy}
    names = [name for name, value in wanted.items() if value]
    if names:
        say_once(
            "repair",
            "mindio_ttp: %s is accepted, and nothing is repaired in a running start: a fault is answered by a dump, "
            "and 'rekindle run' starts all ranks again",
            ", ".join(names),
        )
