"""Runs training under torchrun's launcher, for ``rekindle run``."""
