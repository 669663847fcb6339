"""Carries one file from memory to its place, verified on the way, and completes its CRC-32 fields."""

from __future__ import annotations

from collections.abc import Callable

from rekindle.format.file_receipt import TORCH
from rekindle.format.torchzip import CrcFiller, read_records
from rekindle.memory.kept import Identity, OpenFile
from rekindle.storage.copy import PIECE
from rekindle.storage.place import Pieces, Place
from rekindle.storage.throttle import Budget

__all__ = ["carry"]


def carry(opened: OpenFile, place: Place, progress: Callable[[int], object], budget: Budget) -> Identity:
    """Puts the file there, durable on return. Returns what the store shows of it.

    Raises CorruptError when memory differs from its checksums, and OSError when storage refuses. Either leaves the
    file that was there before.
    """
    whole = opened.map()
    return place.write(_verified_pieces(opened, whole, budget), whole, progress)


def _verified_pieces(opened: OpenFile, whole: memoryview, budget: Budget) -> Pieces:
    """Yields the file's pieces, each hashed, completed and paid for from the budget."""
    receipt = opened.receipt
    records = []
    if receipt.kind == TORCH:
        records = read_records(lambda at, n: bytes(whole[at : at + n]), receipt.nbytes, receipt.target)
    filler = CrcFiller(records)
    for number in range(len(receipt.checksums)):
        opened.check(whole, number)
        at, stop = receipt.block(number)
        filler.take(whole, at, stop)  # the mapping is private: memory keeps what its checksums say
        while at < stop:
            end = min(at + budget.piece(PIECE), stop)
            budget.take(end - at)
            yield whole[at:end], at
            at = end
