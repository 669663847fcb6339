"""The first process of a node's namespaces: first_process.py NAME HOSTS BYTES SOURCE PLACE

It lives as long as its standard input is open. Its end is that of the node: the kernel kills all other processes there.
"""

import os
import signal
import socket
import subprocess
import sys


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def main(name: str, hosts: str, nbytes: str, source: str, place: str) -> None:
    outside = os.readlink("/proc/self")  # what is mounted here is still that of all processes
    mount("-t", "proc", "proc", "/proc")
    socket.sethostname(name)
    mount("-t", "tmpfs", "-o", f"size={nbytes},mode=1777", "tmpfs", "/dev/shm")
    mount("--bind", hosts, "/etc/hosts")
    if source:
        mount("--bind", source, place)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel then reaps those whose parents have ended
    print(outside, flush=True)
    sys.stdin.buffer.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
