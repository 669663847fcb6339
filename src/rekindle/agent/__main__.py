"""Starts an agent for ``python -m rekindle.agent JOB_DIRECTORY [PID]``, as trainers do; sets up its log.

The agent itself is in ``rekindle.agent.service``.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from rekindle.agent.service import run
from rekindle.errors import RekindleError
from rekindle.memory.job_dir import JobDir


def main() -> int:
    """Serves the job in the first argument, after the agent in the second. Returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        return run(JobDir(Path(sys.argv[1])), *map(int, sys.argv[2:]))
    except RekindleError as error:
        logging.getLogger("rekindle.agent").error("%s", error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
