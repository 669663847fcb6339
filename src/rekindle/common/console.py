"""Shows warnings on stderr, with Rekindle's name, in programs that have not set up logging."""

from __future__ import annotations

import logging
import sys

__all__ = ["show_warnings"]

_PREFIX = "rekindle: "


class _LastResort(logging.Handler):
    """Prints records with a prefix, where Python's own last resort has none. Silent once another handler gets them."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is None or self._others(record.name):
            return
        try:
            sys.stderr.write(f"{_PREFIX}{self.format(record)}\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)

    def _others(self, name: str) -> bool:
        """True if another handler gets this logger's records. Checked each time, as logging may be set up late."""
        logger: logging.Logger | None = logging.getLogger(name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False


def show_warnings() -> None:
    """Attaches the handler to Rekindle's own logger, once. The root logger stays as it is."""
    ours = logging.getLogger("rekindle")
    if not any(isinstance(handler, _LastResort) for handler in ours.handlers):
        ours.addHandler(_LastResort(logging.WARNING))
