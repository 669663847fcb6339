"""Reads and writes the bytes that docs/format.md describes."""
