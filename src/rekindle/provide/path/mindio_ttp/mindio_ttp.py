"""Stands in for ``mindio_ttp`` in a run that was started with ``--provide mindio_ttp``."""

import importlib
import os
import sys

_MODULES = ("", ".framework_ttp", ".framework_ttp.ttp_decorator", ".controller_ttp", ".utils")
"""Modules that programs import. Each is one module, whichever of its names a program imports."""

try:
    import rekindle.provide.mindio_ttp
except ModuleNotFoundError as error:
    if error.name != "rekindle":
        raise
    # Another interpreter, which the run has started, and which may have a package of this name: it isn't hidden.
    sys.path.remove(os.path.dirname(__file__))
    del sys.modules[__name__]
    importlib.import_module(__name__)
else:
    for _module in _MODULES:
        sys.modules[__name__ + _module] = importlib.import_module(rekindle.provide.mindio_ttp.__name__ + _module)
