"""Stands in for ``torch_nebula`` in a run that was started with ``--provide torch_nebula``."""

import importlib
import os
import sys

try:
    import rekindle.provide.torch_nebula
except ModuleNotFoundError as error:
    if error.name != "rekindle":
        raise
    # Another interpreter, which the run has started, and which may have a package of this name: it isn't hidden.
    sys.path.remove(os.path.dirname(__file__))
    del sys.modules[__name__]
    importlib.import_module(__name__)
else:
    sys.modules[__name__] = rekindle.provide.torch_nebula  # one module, whichever of its names a program imports
