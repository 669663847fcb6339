"""Keeps the node's memory store."""
