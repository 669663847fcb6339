"""Copies from and to devices, in the order of their queues: the one place that knows CUDA and its like."""

from rekindle.devices.clearing import register

__all__ = ["register"]
