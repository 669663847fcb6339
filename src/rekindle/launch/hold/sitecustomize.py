"""Holds an interpreter between its start and the script, where Python looks for site-wide settings.

``launch/warm.py`` puts this folder first into PYTHONPATH. The script's own frames, arguments and traceback then are
those of any other start: nothing of Rekindle is on the stack when it begins.
"""

import os

if os.environ.get("REKINDLE_SPARE_CHECK"):
    pass  # the interpreter that was asked if it would come here: it has, and goes on to say so
else:
    try:
        from rekindle.launch.spare import hold
    except BaseException:
        os._exit(1)  # without this the script would run
    if not hold():  # returns in a worker, and nowhere else: True if the user's own sitecustomize has run
        # Python takes this for "there is no such module" and forgets the attempt.
        raise ImportError("no site-wide settings", name="sitecustomize")
