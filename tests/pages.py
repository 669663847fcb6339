"""What commands have seen, put into a page of the documents between ``<!-- mark -->`` and ``<!-- end -->``."""

from __future__ import annotations

from pathlib import Path

__all__ = ["put"]


def put(page: Path, mark: str, body: str) -> None:
    before, rest = page.read_text().split(f"<!-- {mark} -->", 1)
    after = rest.split("<!-- end -->", 1)[1]
    page.write_text(f"{before}<!-- {mark} -->\n\n{body.rstrip()}\n\n<!-- end -->{after}")
