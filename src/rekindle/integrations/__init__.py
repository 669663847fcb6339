"""Adapters to other people's interfaces. Nothing below imports them: each can be deleted by itself."""
