"""Joins a job and leaves it; all who write checkpoints go through it."""
