"""Runs training under torchrun's launcher."""
