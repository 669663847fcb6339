"""Carries a checkpoint from stores into a live state."""
