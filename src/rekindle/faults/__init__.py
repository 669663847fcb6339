"""Notices faults, secures the newest step, and tells of it."""
