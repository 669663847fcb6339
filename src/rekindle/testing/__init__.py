"""Ships the tests that every store has to pass. Subclass ``StoreContract`` in a test module; pytest finds its tests."""

from __future__ import annotations

from rekindle.testing.contract import StoreContract
from rekindle.testing.shards import make_shard

__all__ = ["StoreContract", "make_shard"]
