"""Holds the agent: the process that outlives the trainers. It imports no torch and keeps all of its state in files."""
