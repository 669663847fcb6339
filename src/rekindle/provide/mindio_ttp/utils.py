"""Stands in for ``mindio_ttp.utils``: times of updates, by which the original judges if device memory can be mended."""

from __future__ import annotations

__all__ = ["tft_can_do_uce_repair", "tft_set_update_end_time", "tft_set_update_start_time"]


def tft_set_update_start_time(start_time: int | None = None) -> None:
    """Does nothing: phases are known by ``tft_start_updating_os``."""


def tft_set_update_end_time(end_time: int | None = None) -> None:
    """Does nothing: phases are known by ``tft_end_updating_os``."""


def tft_can_do_uce_repair(hbm_error_time: int, start_time: int | None = None, end_time: int | None = None) -> bool:
    """Returns False: device memory isn't mended in a running start. A fault of it is answered by a dump."""
    return False
