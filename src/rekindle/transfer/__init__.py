"""Converts checkpoints into other programs' formats, and back."""
