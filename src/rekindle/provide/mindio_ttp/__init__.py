"""Stands in for MindIO's ``mindio_ttp``: the same names, over ``Checkpointer.guard``. See docs/mindio_ttp.md.

Imports torch when a processor is started.
"""
