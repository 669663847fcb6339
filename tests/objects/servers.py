"""Real S3 servers on loopback: Ceph's radosgw, moto where there is no Ceph, and rclone, which ignores conditions."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
KEY, SECRET = "AKIAKEY1", "SECRETKEY1"


@dataclass(frozen=True)
class Server:
    kind: str
    endpoint: str

    @property
    def environment(self) -> dict[str, str]:
        """Variables that a job's environment needs."""
        keys = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}
        return {**keys, "AWS_ENDPOINT_URL": self.endpoint}

    def client(self) -> Any:
        """Another client, for looking at what is really there."""
        import boto3
        from botocore.config import Config

        config = Config(request_checksum_calculation="when_required", response_checksum_validation="when_required")
        keys = {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET, "region_name": "us-east-1"}
        return boto3.client("s3", endpoint_url=self.endpoint, config=config, **keys)

    def bucket(self) -> str:
        """A new bucket."""
        name = f"bucket-{secrets.token_hex(4)}"
        self.client().create_bucket(Bucket=name)
        return name


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def some_server(directory: Path) -> Iterator[Server]:
    """The best that can be had here; ``REKINDLE_TEST_S3`` is ``radosgw`` or ``moto`` for one of them.

    Test processes that name the same ``directory`` share one radosgw, which takes 15 s of a quiet machine, and 1 GB.
    Each has a moto of its own, which takes a second.
    """
    wanted = os.environ.get("REKINDLE_TEST_S3")
    ceph = all(map(shutil.which, ("radosgw", "ceph-osd", "ceph-mon", "ceph-mgr", "ceph", "radosgw-admin")))
    with ExitStack() as stack:
        server: Server | None = None
        if wanted == "radosgw" or (ceph and wanted is None):
            try:
                server = stack.enter_context(radosgw(directory))
            except subprocess.SubprocessError as error:  # it takes some memory, and half a minute on a busy machine
                if wanted is not None:
                    raise
                warnings.warn(f"radosgw has not come up, so this is moto: {error}", stacklevel=1)
        yield server or stack.enter_context(moto())


@contextmanager
def radosgw(directory: Path) -> Iterator[Server]:
    """Started by the first test process that comes, stopped by the last one that leaves."""
    directory.mkdir(exist_ok=True)
    with open(directory / "users", "w") as users:
        with _alone(directory):
            endpoint = _start_once(directory)
            fcntl.flock(users, fcntl.LOCK_SH)
        try:
            yield Server("radosgw", endpoint)
        finally:
            with _alone(directory), suppress(BlockingIOError):  # others still use it
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _radosgw("stop", directory, 30)
                (directory / "endpoint").unlink()


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Keeps other test processes from starting or stopping the server meanwhile."""
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _start_once(directory: Path) -> str:
    """The endpoint. Where a start has failed, nobody waits for another one."""
    note = directory / "endpoint"
    if not note.exists():
        note.touch()
        port = free_port()
        try:
            _radosgw("start", directory, 150, str(port))
        except subprocess.SubprocessError:
            _radosgw("stop", directory, 30)
            raise
        note.write_text(f"http://127.0.0.1:{port}")
    endpoint = note.read_text()
    if not endpoint:
        raise subprocess.SubprocessError("it has not come up for another process of this run")
    return endpoint


def _radosgw(command: str, directory: Path, seconds: float, *arguments: str) -> None:
    script = str(HERE / "radosgw.sh")
    subprocess.run(["bash", script, command, str(directory), *arguments], check=command == "start", timeout=seconds)


@contextmanager
def moto() -> Iterator[Server]:
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with _running(command, port):
        yield Server("moto", f"http://127.0.0.1:{port}")


@contextmanager
def rclone(directory: Path) -> Iterator[Server]:
    """Serves a directory; a condition on a write is silently ignored."""
    program = Path(sys.executable).with_name("rclone")
    port = free_port()
    options = ["--auth-key", f"{KEY},{SECRET}", "--addr", f"127.0.0.1:{port}", "--vfs-cache-mode", "writes"]
    command = [str(program), "serve", "s3", *options, "--config", str(directory / "none"), str(directory)]
    with _running(command, port):
        yield Server("rclone", f"http://127.0.0.1:{port}")


@contextmanager
def _running(command: list[str], port: int) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{command[0]} has not come up") from None
                time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()
