"""Shows warnings where nobody has set up logging: on stderr, with the name of who warns."""

from __future__ import annotations

import logging
import sys

__all__ = ["show_warnings"]

_PREFIX = "rekindle: "


class _LastResort(logging.Handler):
    """Python's own last resort prints the bare message. Silent as soon as any other handler gets the record."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is None or self._others(record.name):
            return
        try:
            sys.stderr.write(f"{_PREFIX}{self.format(record)}\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)

    def _others(self, name: str) -> bool:
        """Whether somebody else handles what this logger is told. Looked at each time: logging may be set up late."""
        logger: logging.Logger | None = logging.getLogger(name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False


def show_warnings() -> None:
    """Attach the handler to Rekindle's own logger, once. The root logger stays as it is."""
    ours = logging.getLogger("rekindle")
    if not any(isinstance(handler, _LastResort) for handler in ours.handlers):
        ours.addHandler(_LastResort(logging.WARNING))
