"""Holds helpers that know nothing of checkpoints."""
