"""Measures the time between two points of a device's queue, by the device itself."""

from __future__ import annotations

import torch

from rekindle.devices.backend import TimedEvent
from rekindle.devices.events import Event
from rekindle.devices.table import require_backend

__all__ = ["Point", "mark", "seconds_between"]


class Point(Event):
    """Event that also tells when the device has reached it."""

    raw: TimedEvent


def mark(device: torch.device) -> Point:
    """Returns a point on the calling thread's stream. Raises RuntimeError if the device tells no times."""
    return Point(device, require_backend(device).record_timed_event(device))


def seconds_between(first: Point, second: Point) -> float:
    """Returns the time between two points that the device has reached. Raises RuntimeError if it can't be had."""
    return first.raw.elapsed_time(second.raw) / 1e3
