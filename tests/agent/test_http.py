"""The agent's requests: a client can't keep a connection, which is an open file, for as long as it likes."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from rekindle.agent import http
from rekindle.agent.listener import listen


def test_a_client_that_reads_no_answer_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """aiohttp answers a malformed request with all that it has read of it, which is more than a socket holds."""
    monkeypatch.setattr(http, "_CONNECTION_LASTS", 0.5)
    path = tmp_path / "agent.sock"

    def send() -> None:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(30.0)
            line.connect(str(path))
            line.sendall(b"x" * (3 << 20))

    async def serve() -> None:
        runner = await http.serve(listen(path), dict, lambda: None, lambda rank, message: False)
        with pytest.raises(ConnectionError):
            await asyncio.to_thread(send)
        await runner.cleanup()

    asyncio.run(serve())
