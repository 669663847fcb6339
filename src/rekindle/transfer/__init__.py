"""Checkpoints into other people's formats, and out of them."""
