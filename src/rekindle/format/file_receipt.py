"""Reads and writes the receipt of one file in memory: its path, size and checksums."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any

from rekindle.errors import FormatError
from rekindle.format.fields import check_integer, check_integers, check_seconds, check_texts
from rekindle.format.layout import BLOCK
from rekindle.format.receipt import CHECKSUM, VERSION, parse_document, seal

__all__ = ["BYTES", "FOUND", "TORCH", "FileReceipt", "Terms"]

TORCH, BYTES, FOUND = "torch", "bytes", "found"
"""Kinds of files: saved as ``torch.save`` does, saved as bytes, and any other, such as one found on storage."""


@dataclass(frozen=True)
class Terms:
    """Tells when a file in memory goes to its path, and what goes before."""

    after: list[str] = field(default_factory=list)
    """Paths or URLs that storage must have first, as newest in memory or, if memory has none, whatever is there."""
    removes: str | None = None
    """Name of a file in the same directory that goes before this one comes. Only for paths."""
    held: bool = False
    """True if the file stays in memory until it is let go, or until its memory is given back."""

    def encode(self) -> dict[str, Any]:
        """Returns the fields that a receipt has of it: none for a file that goes at once."""
        fields = {"after": self.after, "removes": self.removes, "held": self.held}
        return {name: value for name, value in fields.items() if value}

    @staticmethod
    def decode(fields: dict[str, Any]) -> Terms:
        """Checks the fields of a receipt. Raises TypeError or ValueError."""
        removes, held = fields.get("removes"), fields.get("held", False)
        if removes is not None and os.path.basename(check_texts([removes])[0]) in ("", ".", ".."):
            raise ValueError("removes a file that has no name")
        if removes is not None and os.path.basename(removes) != removes:
            raise ValueError("removes a file of another directory")
        if type(held) is not bool:
            raise ValueError("is neither held nor not")
        return Terms(check_texts(fields.get("after", [])), removes, held)


@dataclass(frozen=True)
class FileReceipt:
    """Describes a file in memory."""

    KIND = "rekindle-file"

    target: str
    """Path or URL that it belongs at."""
    kind: str
    nbytes: int
    checksums: list[str]
    """Checksums of its blocks of ``BLOCK`` bytes, the last of which may be shorter."""
    saved_at: float
    """Time at which it was saved, in seconds since 1970."""
    trace: list[int] | None = None
    """Numbers by which its place tells a directory that was removed from one that is not mounted."""
    terms: Terms = Terms()
    placeholder: bool = False
    """True if a placeholder stood at its path. Whoever removes that before the file arrives has removed the file."""
    mode: int | None = None
    """Rights of the file at a path where none is yet; None for those of whoever writes it."""
    mark: str = ""
    """Text that tells that placeholder from others, wherever it was renamed to; empty where it has none."""

    def block(self, number: int) -> tuple[int, int]:
        """Returns the first byte and the end of a block."""
        return number * BLOCK, min((number + 1) * BLOCK, self.nbytes)

    def encode(self) -> bytes:
        """Returns the receipt's bytes."""
        fields = {
            "format": self.KIND,
            "version": VERSION,
            "target": self.target,
            "kind": self.kind,
            "nbytes": self.nbytes,
            "saved_at": self.saved_at,
            "trace": self.trace,
            **self.terms.encode(),
            "placeholder": self.placeholder,
            "mode": self.mode,
            "mark": self.mark,
            "checksum": {"algorithm": CHECKSUM, "block": BLOCK},
            "checksums": self.checksums,
        }
        return seal(json.dumps(fields, separators=(",", ":")).encode()[1:])

    @staticmethod
    def decode(data: bytes, where: str | os.PathLike[str]) -> FileReceipt:
        """Parses and checks a receipt. Raises FormatError, whose message names ``where``."""
        fields: dict[str, Any] = parse_document(data, FileReceipt.KIND, where)
        try:
            if fields["checksum"] != {"algorithm": CHECKSUM, "block": BLOCK}:
                raise ValueError("has checksums of an unknown kind")
            target, kind = check_texts([fields["target"], fields["kind"]])
            receipt = FileReceipt(
                target=target,
                kind=kind,
                nbytes=check_integer(fields["nbytes"]),
                checksums=check_texts(fields["checksums"]),
                saved_at=check_seconds(fields["saved_at"]),
                placeholder=fields.get("placeholder") is True,
                trace=None if fields["trace"] is None else list(check_integers(fields["trace"], 3, 1 << 64)),
                terms=Terms.decode(fields),
                mode=None if fields.get("mode") is None else check_integer(fields["mode"], 0, 0o7777),
                mark=check_texts([fields.get("mark", "")])[0],
            )
            if kind not in (TORCH, BYTES, FOUND) or len(receipt.checksums) != -(-receipt.nbytes // BLOCK):
                raise ValueError("its kind or the number of its checksums is none that was written")
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"{os.fspath(where)}: is not a valid receipt: {error}") from error
        return receipt
