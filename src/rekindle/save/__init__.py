"""Carries a live state into a snapshot, in memory or on storage."""
