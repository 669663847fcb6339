"""Secures every step of Hugging Face's Trainer: ``attach`` and ``RekindleMixin``."""

from __future__ import annotations

from rekindle.integrations.transformers.attaching import RekindleMixin, attach
from rekindle.integrations.transformers.run import Attachment

__all__ = ["Attachment", "RekindleMixin", "attach"]
