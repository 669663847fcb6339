"""Holds the stores of checkpoints and the copy between them. Imports no torch."""
