"""Stands in for ``mindio_ttp.framework_ttp``: what a training program calls."""

from __future__ import annotations

from rekindle.provide.mindio_ttp.controller_ttp import (
    tft_destroy_controller,
    tft_init_controller,
    tft_start_controller,
)
from rekindle.provide.mindio_ttp.framework_ttp import registering, ttp_decorator
from rekindle.provide.mindio_ttp.framework_ttp.registering import *  # noqa: F403
from rekindle.provide.mindio_ttp.framework_ttp.ttp_decorator import *  # noqa: F403
from rekindle.provide.mindio_ttp.utils import tft_can_do_uce_repair

__all__ = ["tft_can_do_uce_repair", "tft_destroy_controller", "tft_init_controller", "tft_start_controller"]
__all__ += registering.__all__
__all__ += ttp_decorator.__all__
