"""Stands in for ``torch_nebula`` in a run that was started with ``--provide torch_nebula``."""

import sys

import rekindle.provide.torch_nebula

sys.modules[__name__] = rekindle.provide.torch_nebula  # one module, whichever of its names a program imports
