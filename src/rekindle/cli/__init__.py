"""Holds the command line: one module for each group of commands, and the operations that they call."""
