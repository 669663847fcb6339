"""Targets that talk: to the agent over its two sockets, and as an agent that answers nonsense."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rekindle.agent.http import send_request, serve
from rekindle.agent.listener import listen
from rekindle.agent.monitor import RankMonitor
from rekindle.errors import RekindleError
from rekindle.memory.fault import Fault
from rekindle.memory.job_dir import JobDir
from rekindle.memory.status import StatusPage
from tests.fuzz.choices import Case, Choices, apply, edits, text

__all__ = ["answer", "http", "watch"]

_LINES = (
    b"GET /status HTTP/1.1",
    b"POST /drill?rank=0&fault=x HTTP/1.1",
    b"POST /stop HTTP/1.0",
    b"GET /\xff HTTP/1.1",
)
_LINES += (b"POST /drill HTTP/1.1", b"POST /drill?rank=%s HTTP/1.1" % (b"9" * 5000), b"GET / HTTP/9.9", b"\x16\x03\x01")
_LINES += (
    b"POST /drill?rank=1e999&fault=a HTTP/1.1",
    b"Content-Length: 99999999999999999999",
    b"Content-Length: -1",
    b"",
)
_LINES += (b"Transfer-Encoding: chunked", b"ffffffffffffffff", b"5", b"Host: a", b"Expect: 100-continue", b"x" * 9000)
_LINES += (b"Content-Length: 5", b"Connection: Upgrade", b"Upgrade: websocket", b"Content-Encoding: deflate", b"\0")
_LINES += (b"POST /drill?rank=0&fault=%F0%28 HTTP/1.1", b"Cookie: " + b"a=b;" * 500, b"0", b"PRI * HTTP/2.0")


class http:
    """Bytes for the agent's HTTP socket. It answers the next question as ever."""

    @staticmethod
    def make(choices: Choices) -> Case:
        parts = []
        for _ in range(1 + choices.byte() % 8):
            parts.append(choices.rest(choices.byte() % 40) if choices.byte() % 8 == 7 else choices.pick(_LINES))
            parts.append(b"\r\n" if choices.byte() % 8 else b"")
        return {"bytes": base64.b64encode(b"".join(parts)).decode(), "ends": choices.byte() % 2}

    @staticmethod
    def run(case: Case, place: Path) -> None:
        asyncio.run(_http(case, place / "agent.sock"))


async def _http(case: Case, path: Path) -> None:
    def tell(rank: int, message: dict[str, Any]) -> bool:
        json.dumps(message).encode()
        return False

    loop = asyncio.get_running_loop()
    failed: list[Any] = []
    loop.set_exception_handler(lambda _, context: failed.append(context))
    runner = await serve(listen(path), lambda: {"pid": 1}, lambda: None, tell)
    try:
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(base64.b64decode(case["bytes"]))
        if case["ends"]:
            writer.write_eof()
        with suppress(asyncio.TimeoutError, OSError):
            head = await asyncio.wait_for(reader.readline(), 0.05 if not case["ends"] else 1.0)
            assert b" 500 " not in head, head
        writer.close()
        other, more = await asyncio.open_unix_connection(str(path))
        more.write(b"GET /status HTTP/1.0\r\n\r\n")
        assert b'{"pid": 1}' in await asyncio.wait_for(other.read(), 5.0)
        more.close()
    finally:
        await runner.cleanup()
    if failed:
        raise failed[0].get("exception") or AssertionError(failed[0]["message"])


class watch:
    """Lines for the socket by which ranks speak to their agent. It looks at all other ranks as ever."""

    # The fence lets no signal through: this very process is the rank.
    HELLO = {"rank": 0, "pid": 0, "watchdog": 60.0, "deadline": 25.0, "stacks": 0, "since": 1.0, "joined": 1.0}
    FAULT = {
        "cause": "exception",
        "rank": 0,
        "generation": 1,
        "step": 3,
        "what": "w",
        "detail": "",
        "noticed": 2.0,
        "at": 1.0,
    }

    @staticmethod
    def make(choices: Choices) -> Case:
        hello: Any = json.loads(json.dumps(watch.HELLO))
        fault: Any = {"fault": json.loads(json.dumps(watch.FAULT))}
        case: Case = {"hello": edits({"": hello}, choices, 2), "fault": edits({"": fault}, choices, 3)}
        case["page"] = [choices.number(4096), choices.byte()]
        case["raw"] = base64.b64encode(choices.rest(300)).decode() if choices.byte() % 8 == 7 else ""
        return case

    @staticmethod
    def run(case: Case, place: Path) -> None:
        job = JobDir(place)
        page = StatusPage(job.paths.status_page(0), 1)
        page.write()
        lines = []
        for name, seed in (("hello", {**watch.HELLO, "pid": os.getpid()}), ("fault", {"fault": dict(watch.FAULT)})):
            whole: dict[str, Any] = {"": seed}
            apply(whole, case[name])
            lines.append(text(whole.get("")) + b"\n")
        asyncio.run(_watched(job, [base64.b64decode(case["raw"]), *lines], case["page"]))


async def _watched(job: JobDir, lines: list[bytes], page: list[int]) -> None:
    failed: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
    files = len(os.listdir("/proc/self/fd"))
    watching = RankMonitor(job, lambda on: None)
    ours, theirs = socket.socketpair()
    _, to_agent = await asyncio.open_connection(sock=ours)
    from_rank, to_rank = await asyncio.open_connection(sock=theirs, limit=1 << 20)
    meeting = asyncio.ensure_future(watching._serve_rank(from_rank, to_rank))
    to_agent.write(b"".join(lines))
    for _ in range(3):
        await asyncio.sleep(0)
    path = job.paths.status_page(0)
    data = bytearray(path.read_bytes())
    data[page[0]] = page[1]
    path.write_bytes(data)
    for _ in range(3):
        watching._check_ranks()
        await asyncio.sleep(0)
    to_agent.close()
    await asyncio.wait_for(meeting, 5.0)
    for number in list(watching.ranks):
        watching._remove(watching.ranks[number])
    await asyncio.sleep(0)
    if failed:
        raise failed[0].get("exception") or AssertionError(failed[0]["message"])
    assert len(os.listdir("/proc/self/fd")) <= files + 1, "files are left open"


class answer:
    """What an agent's socket may answer to the commands, and what it may have written down."""

    @staticmethod
    def make(choices: Choices) -> Case:
        body: Any = {"pid": 1, "error": None, "durable": 3, "step": None, "done": 0, "total": 0, "trainers": {}}
        case: Case = {"body": edits({"": body}, choices, 3), "fault": edits({"": dict(watch.FAULT)}, choices, 3)}
        case["head"] = choices.pick(
            ("200 OK", "500 No", "301 Moved\r\nLocation: http://x/", "999", "", "200 OK\r\nX: \xff")
        )
        case["length"] = choices.pick((0, 0, 0, 1, -1, 1 << 40))
        return case

    @staticmethod
    def run(case: Case, place: Path) -> None:
        whole: dict[str, Any] = {"": {"pid": 1, "error": None, "durable": 3, "step": None, "done": 0, "total": 0}}
        apply(whole, case["body"])
        body = text(whole.get(""))
        length = max(0, len(body) + case["length"])
        head = f"HTTP/1.1 {case['head']}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        fault: dict[str, Any] = {"": dict(watch.FAULT)}
        apply(fault, case["fault"])
        with suppress(RekindleError):
            json.dumps(Fault.from_json(fault.get("")).to_json())
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(place / "agent.sock"))
            server.listen()
            thread = threading.Thread(target=_answer, args=(server, head.encode("latin-1") + body), daemon=True)
            thread.start()
            began = time.monotonic()
            with suppress(RekindleError):
                found = send_request(place / "agent.sock", "GET", "/status", timeout=0.1)
                assert isinstance(found, dict)
            assert time.monotonic() - began < 5.0
            thread.join()


def _answer(server: socket.socket, data: bytes) -> None:
    with suppress(OSError):
        line, _ = server.accept()
        with line:
            line.settimeout(1.0)
            line.recv(4096)
            line.sendall(data)
