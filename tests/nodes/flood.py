"""Somebody who knows where an agent listens, and no secret: floods its port. Prints what it has done.

It runs on a node of a lab, by the standard library alone, until its input ends: ``python flood.py HOST PORT START``.
"""

from __future__ import annotations

import json
import os
import resource
import select
import socket
import sys
from collections import Counter, deque
from contextlib import suppress

_AT_ONCE = 1500
"""Connections that are held open, or are on their way, at a time."""


def _frame(message: object) -> bytes:
    body = json.dumps(message).encode()
    return len(body).to_bytes(4, "big") + body


def main(host: str, port: int, start: str) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (4 * _AT_ONCE, 4 * _AT_ONCE))
    hello = _frame({"rekindle": 1, "name": "stranger", "start": start, "nonce": "0" * 64})
    proof = _frame({"proof": "0" * 64})
    openings = {
        "silence": b"",
        "a part of a word": hello[:10],
        "garbage": os.urandom(1000),
        "a huge length": b"\xff\xff\xff\xff",
        "a wrong proof": hello + proof + _frame({"verb": "fault"}) + bytes(16),
        "an answer that is not read": hello,
    }
    done: Counter[str] = Counter()
    held: deque[socket.socket] = deque()
    todo: dict[int, tuple[socket.socket, str]] = {}
    """Connections that are being made."""
    made = select.poll()
    kinds = list(openings)
    while not select.select([sys.stdin], [], [], 0.02)[0]:
        for _ in range(20):
            one, kind = socket.socket(), kinds[done["attempts"] % len(kinds)]
            one.setblocking(False)
            one.connect_ex((host, port))
            todo[one.fileno()] = one, kind
            made.register(one, select.POLLOUT)
            done["attempts"] += 1
            held.append(one)
        for number, _ in made.poll(0):
            one, kind = todo.pop(number)
            made.unregister(one)
            with suppress(OSError):
                one.send(openings[kind])
                done[kind] += 1
        while len(held) > _AT_ONCE:
            oldest = held.popleft()
            if todo.pop(oldest.fileno(), None):
                made.unregister(oldest)
            oldest.close()
    print(json.dumps(done))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
