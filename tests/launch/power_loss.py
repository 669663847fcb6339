"""Cuts all connections of this process's network, in which nobody says goodbye: as if nodes had lost their power.

To be run in a network of its own: ``unshare --map-root-user --net``.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

from rekindle.launch import meeting

_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
LONG = 120.0


def set_loopback(up: bool) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(control, _SIOCGIFFLAGS, request))[1]
        flags = flags | _IFF_UP if up else flags & ~_IFF_UP
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags))


def lose_connections() -> None:
    """Print the seconds after which connections are lost: one that has sent something since, and one that awaits it."""
    meeting.SILENT_FOR, meeting._PROBE_EVERY = 2, 1
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        clients = [socket.create_connection(("127.0.0.1", port), LONG) for _ in range(2)]
        peers = [listener.accept()[0] for _ in clients]
        meeting._bound_silence(port)
        set_loopback(False)
        clients[0].sendall(b"question")
        began, lost = time.monotonic(), []
        for client in clients:
            try:
                client.recv(1)
            except OSError:
                lost.append(time.monotonic() - began)
        for one in (*clients, *peers):
            one.close()
    print(json.dumps(lost))


def lose_store(*command: str) -> None:
    """Start two launchers with this command, and lose the first one's node. Print how the other one ends."""
    begun = Path(command[-1])
    script = begun.with_name("rank.sh")
    script.write_text(f"echo $$ >> {begun}; exec sleep 600")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    until = time.monotonic() + LONG
    for count in (1, 2):
        line = [*command[:-1], f"--rdzv-endpoint=127.0.0.1:{port}", "sh", str(script)]
        started.append(subprocess.Popen(line, stderr=subprocess.PIPE, text=True))
        while count == 1 and socket.socket().connect_ex(("127.0.0.1", port)) and time.monotonic() < until:
            time.sleep(0.05)
    while not begun.exists() or begun.read_text().count("\n") < 2:
        assert time.monotonic() < until
        time.sleep(0.05)
    set_loopback(False)
    lost = time.monotonic()
    _, told = started[1].communicate(timeout=LONG)
    print(json.dumps([started[1].returncode, time.monotonic() - lost, told.splitlines()]))
    started[0].kill()
    for pid in begun.read_text().split():
        if os.path.exists(f"/proc/{pid}"):
            os.kill(int(pid), 9)


if __name__ == "__main__":
    set_loopback(True)
    lose_store(*sys.argv[1:]) if sys.argv[1:] else lose_connections()
