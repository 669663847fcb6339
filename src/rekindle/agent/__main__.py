"""``python -m rekindle.agent JOB_DIRECTORY``: how a trainer starts its node's agent."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from rekindle.agent.service import run
from rekindle.errors import RekindleError
from rekindle.memory.job_dir import JobDir


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        return run(JobDir(Path(sys.argv[1])))
    except RekindleError as error:
        logging.getLogger("rekindle.agent").error("%s", error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
