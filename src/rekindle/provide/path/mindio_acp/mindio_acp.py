"""Stands in for ``mindio_acp`` in a run that was started with ``--provide mindio_acp``."""

import sys

import rekindle.provide.mindio_acp

sys.modules[__name__] = rekindle.provide.mindio_acp  # one module, whichever of its names a program imports
