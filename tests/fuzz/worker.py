"""One target under atheris, in a process of its own: ``python -m tests.fuzz.worker TARGET SECONDS CORPUS``.

What it finds it makes small, and keeps as a case. libFuzzer ends the process only at a hang or a crash of the
interpreter; the input is then in a file.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import atheris  # type: ignore[import-not-found, unused-ignore]

with atheris.instrument_imports(include=["rekindle"]):
    pass

from tests.fuzz.choices import Case, Choices
from tests.fuzz.fence import signature
from tests.fuzz.targets import TARGETS, run

_SMALLER = 60.0
"""Seconds that making a finding small may take."""


def _fails(name: str, data: bytes) -> tuple[str, Case] | None:
    """What is found, and with which case; None when all is well."""
    case = TARGETS[name].make(Choices(data))
    try:
        run(TARGETS[name], case)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return signature(error), case
    return None


def _smaller(name: str, data: bytes, what: str) -> bytes:
    """Leave out what can be left out, and make zeros of what can be zeros, as long as the same is found."""
    until = time.monotonic() + _SMALLER
    size = len(data)
    while size:
        at = 0
        while at < len(data) and time.monotonic() < until:
            for new in (data[:at] + data[at + size :], data[:at] + bytes(size) + data[at + size :]):
                found = _fails(name, new) if new != data and len(new) <= len(data) else None
                if found is not None and found[0] == what:
                    data = new
                    break
            else:
                at += size
        size //= 2
    return data


def main() -> None:
    name, seconds, kept, found = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    seen: set[str] = set()

    def one(data: bytes) -> None:
        bad = _fails(name, data)
        if bad is None or bad[0] in seen:
            return
        seen.add(bad[0])
        small = _smaller(name, data, bad[0])
        again = _fails(name, small) or bad
        number = len(list(found.glob("*.json")))
        (found / f"found-{number}.json").write_text(json.dumps({"finds": again[0], "case": again[1]}, indent=1) + "\n")
        print(f"FOUND {again[0]}", flush=True)

    flags = [f"-max_total_time={seconds}", "-print_final_stats=1", "-max_len=1024", "-timeout=90", "-rss_limit_mb=6000"]
    flags += ["-report_slow_units=60"]
    flags += [f"-artifact_prefix={found}{os.sep}", "-close_fd_mask=0", "-len_control=20", str(kept)]
    atheris.Setup([sys.argv[0], *flags], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
