"""Trains two steps and fails; in its second start writes down all that a script can see of how it was started."""

import atexit
import ctypes
import faulthandler
import gc
import logging
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback

import numpy
import torch
import torch.distributed as dist

import rekindle


def train(root, go):
    dist.init_process_group("gloo")
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt = rekindle.Checkpointer(root, {"model": model, "optimizer": optimizer})
    for step in range(ckpt.restore() + 1, 4):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        ckpt.step(step)
    deadline = time.monotonic() + 120
    while not os.path.exists(go) and time.monotonic() < deadline:
        time.sleep(0.02)
    os._exit(3)


def child(queue):
    main = sys.modules["__main__"]
    queue.put([main.__name__, getattr(main, "__file__", None), os.getppid() == parent_pid(), sys.argv])


def parent_pid():
    return int(os.environ["LOOKING"])


def look_at_interpreter():
    main = sys.modules["__main__"]
    yield "argv", sys.argv
    yield "orig_argv", sys.orig_argv
    yield "path", sys.path
    yield "flags", sys.flags
    yield "executable", sys.executable
    yield "meta_path", sys.meta_path[1:]
    yield "hooks", sys.path_hooks
    yield "main", sorted((name, type(value).__name__) for name, value in vars(main).items())
    yield "file", main.__file__, main.__name__, main.__package__, main.__doc__
    yield "spec", getattr(main.__spec__, "name", None)
    yield "sibling", relative_import()
    yield "sitecustomize", "sitecustomize" in sys.modules
    yield "stack", [(frame.filename, frame.name) for frame in traceback.extract_stack()]
    yield "environ", sorted(os.environ.items()), type(os.environ._data).__name__
    yield "env", subprocess.run(["env"], capture_output=True, text=True, check=True).stdout
    yield "logging", logging.root.handlers, logging.root.level, logging.lastResort
    yield "gc", gc.get_threshold(), gc.isenabled()
    yield "faulthandler", faulthandler.is_enabled()
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        yield "stream", stream.name, stream.encoding, stream.errors, stream.isatty(), stream.fileno()
        yield "buffering", stream.line_buffering, stream.write_through, type(stream.buffer).__name__
    thread = threading.main_thread()
    yield "thread", thread is threading.current_thread(), thread.native_id == threading.get_native_id()
    yield "thread", threading.active_count(), thread.ident == threading.get_ident(), thread.name


def relative_import():
    if __package__:
        from .sibling import NAME
    else:
        from sibling import NAME
    return NAME


def look_at_process():
    pid = os.getpid()
    yield "parent", os.getppid()
    yield "group", os.getpgid(0) == pid, os.getsid(0) == pid
    for name in ("cmdline", "comm"):
        with open(f"/proc/self/{name}") as file:
            yield name, file.read()
    with open("/proc/self/environ", "rb") as file:
        yield "environ", sorted(file.read().split(b"\0"))
    with open("/proc/self/status") as file:
        yield (
            "status",
            [line for line in file if line.startswith(("SigB", "SigI", "SigC", "Cap", "Umask", "Cpus_allowed:"))],
        )
    yield "exe", os.readlink("/proc/self/exe"), os.getcwd()
    yield "descriptors", sorted(describe(number) for number in os.listdir("/proc/self/fd"))
    yield "signals", [(number, str(signal.getsignal(number))) for number in sorted(signal.valid_signals())]
    yield "priority", os.sched_getscheduler(0), os.nice(0), sorted(os.sched_getaffinity(0))
    on_death, adopts = ctypes.c_int(), ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(on_death), 0, 0, 0)
    ctypes.CDLL(None).prctl(37, ctypes.byref(adopts), 0, 0, 0)
    yield "prctl", on_death.value, adopts.value
    names = [name for name in dir(resource) if name.startswith("RLIMIT")]
    yield "limits", [(name, resource.getrlimit(getattr(resource, name))) for name in names]


def describe(number):
    try:
        return number, os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return number, "the listing's own"


def look_at_torch():
    yield "threads", torch.get_num_threads(), torch.get_num_interop_threads(), os.environ.get("OMP_NUM_THREADS")
    yield "drawn", torch.initial_seed(), numpy.random.randint(1 << 62), random.random()
    yield "defaults", torch.get_default_dtype(), torch.is_grad_enabled()


def look_at_children():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's, once the other rank has ended: this may take longer
    os.environ["LOOKING"] = str(os.getpid())
    for method in ("spawn", "fork", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        yield method, queue.get(timeout=60), process.join(60), process.exitcode
    told = "import os, sys; print(sys.path, os.environ.get('PYTHONPATH'), 'sitecustomize' in sys.modules)"
    yield "python", subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True).stdout


def main():
    root, go = sys.argv[1:3]
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        train(root, go)
    for looks in (look_at_interpreter(), look_at_process(), look_at_torch(), look_at_children()):
        for name, *values in looks:
            print(name, *values, flush=True)
    print("to standard error", file=sys.stderr)
    atexit.register(print, "atexit, first registered", flush=True)
    atexit.register(print, "atexit, last registered", flush=True)
    raise RuntimeError("the end")


if __name__ == "__main__":
    main()
