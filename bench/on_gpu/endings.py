"""Experiments on processes that end badly: one whose memory another one reads, and one whose device has failed."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

from sizes import GIB

from on_gpu.cases import Case, Speaker, pack, unpack
from on_gpu.places import Places
from on_gpu.results import Report

__all__ = ["assert_process", "device_assert", "exporter", "ipc", "reader", "restore_process"]

_READ = 4.0
"""Seconds for which a process reads another one's memory."""


def _xids() -> list[str]:
    """Returns the driver's messages of faults, as far as this user may read the kernel's log."""
    try:
        done = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace", check=False)
    except FileNotFoundError:
        return []
    return [line for line in done.stdout.splitlines() if "Xid" in line]


def exporter(speaker: Speaker) -> None:
    import torch
    import torch.multiprocessing

    tensor = torch.ones(GIB, device="cuda")  # 4 GiB
    torch.cuda.synchronize()
    speaker.say(tensor=pack(tensor))
    speaker.ready()
    time.sleep(60)


def reader(speaker: Speaker, tensor: str) -> None:
    import torch
    import torch.multiprocessing

    shared = unpack(tensor)
    float(shared.sum().item())
    speaker.ready()
    until = time.monotonic() + _READ
    try:
        while time.monotonic() < until:
            for _ in range(50):
                total = shared.sum()
            torch.cuda.synchronize()
            speaker.say(reading=True)
        speaker.say(ended=f"reads on: sum {total.item():.4g} of {shared.numel():.4g}")
    except RuntimeError as error:
        speaker.say(ended=f"{type(error).__name__}: {str(error).splitlines()[0]}")


def ipc(report: Report, places: Places) -> None:
    before = len(_xids())
    with Case("on_gpu.endings:exporter") as owner:
        if not owner.wait_ready(report.left):
            raise RuntimeError(f"the exporting process {owner.ending}: {owner.errors()}")
        with Case("on_gpu.endings:reader", {"tensor": owner.said["tensor"]}) as other:
            if not other.wait_ready(report.left - 10):
                raise RuntimeError(f"the reading process {other.ending}: {other.errors()}")
            other.go()
            other.listen(5, until="reading")  # it goes on for some seconds
            reading = "reading" in other.said and "ended" not in other.said
            gone = owner.kill()
            killed = owner.killed()
            other.listen(8)
            ended = other.said.get("ended", f"no end within 8 s: it {other.ending}")
    report.require(reading, "the reader read the owner's memory when that was killed")
    report.require(killed, "a SIGKILL has ended the owner")
    report.figure("the owner, kill -9 until gone", gone or 0.0, "s")
    report.figure("the reader", ended, expected="a hang or an error", met=not ended.startswith("reads on"))
    report.figure("Xid messages", "; ".join(_xids()[before:])[-300:] or "none that can be read", expected="Xid 31")


def assert_process(speaker: Speaker, memory: str, disk: str) -> None:
    """A guarded job of one rank with NCCL, whose device fails an assert after step 5."""
    import torch

    import rekindle
    from on_gpu.network import counting_state

    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    x = torch.ones(1024, device="cuda")
    torch.distributed.all_reduce(x)
    parameters, optimizer = counting_state(GIB)
    state = {"parameters": parameters, "optimizer": optimizer}
    ckpt = rekindle.Checkpointer(Path(disk) / "run", state, memory=memory, snapshot_every=1, persist_every=10**9)
    ckpt.restore()
    step = 0
    with ckpt.guard(watchdog=False):
        deadline = time.monotonic() + 20
        while step < 5 or (ckpt.metrics.saves < 5 and time.monotonic() < deadline):
            step += 1
            optimizer.step()
            ckpt.step(step)
            torch.distributed.all_reduce(x)
            torch.cuda.synchronize()
        newest = ckpt.latest()  # the snapshot is committed: the fault comes after it
        speaker.say(step=step, saved=newest.step if newest is not None else 0)
        work = torch.distributed.all_reduce(x, async_op=True)
        x[torch.full((1,), 1 << 40, device="cuda")]  # an index out of range: an assert of the device
        torch.distributed.all_reduce(x, async_op=True)
        time.sleep(3)  # for NCCL's watchdog, which looks ten times a second
        speaker.say(reached_python=True)
        work.wait()
        torch.cuda.synchronize()


def restore_process(speaker: Speaker, memory: str, disk: str, size: int) -> None:
    """Restore a counting state, and say what it holds."""
    import torch

    import rekindle
    from on_gpu.network import counting_state

    parameters, optimizer = counting_state(size)
    state = {"parameters": parameters, "optimizer": optimizer}
    ckpt = rekindle.Checkpointer(Path(disk) / "run", state, memory=memory, snapshot_every=1, persist_every=10**9)
    torch.cuda.synchronize()
    began = time.perf_counter()
    step = ckpt.restore()
    torch.cuda.synchronize()
    took = time.perf_counter() - began
    low = min(float(p.min()) for p in parameters)
    high = max(float(p.max()) for p in parameters)
    speaker.say(step=step, low=low, high=high, source=ckpt.metrics.restored_from, seconds=took)


def restored(places: Places, size: int, limit: float) -> dict[str, Any]:
    """Returns the answer of ``restore_process`` in a process of its own."""
    options = {"memory": places.memory, "disk": places.disk, "size": size}
    with Case("on_gpu.endings:restore_process", options) as case:
        return case.result(limit)


def device_assert(report: Report, places: Places) -> None:
    for rethrow, expected in (("1", "SIGABRT"), ("0", "a Python exception")):
        if not report.has_time(18, f"rethrow {rethrow}"):
            continue
        with report.part(f"rethrow {rethrow}"):
            _assert_once(report, places, rethrow, expected)


def _assert_once(report: Report, places: Places, rethrow: str, expected: str) -> None:
    disk = Path(places.disk) / f"rethrow-{rethrow}"
    own = Places(places.memory, places.huge, str(disk), places.kind)
    env = {"TORCH_NCCL_RETHROW_CUDA_ERRORS": rethrow, "TORCH_NCCL_ASYNC_ERROR_HANDLING": rethrow}
    with Case("on_gpu.endings:assert_process", {"memory": own.memory, "disk": own.disk}, env) as case:
        case.listen(min(report.left, 40))
        code = case.exit_code(min(report.left, 15))
        said, errors, output = case.said, case.errors(), case.output()
    step = said.get("step", 0)
    report.require(step > 0 and said["saved"] == step, f"a snapshot of step {step} before the fault: {errors}")
    report.require(code != 0 and (code is None or "ssert" in output), f"an assert of the device: exit code {code}")
    ended = _describe(code, errors)
    met = code == -6 if rethrow == "1" else code is not None and code > 0
    report.figure(f"rethrow {rethrow}: the job ends by", ended, expected=expected, met=met)
    report.figure(f"rethrow {rethrow}: main thread had its say", str(said.get("reached_python", False)))
    found = restored(own, GIB, min(report.left, 20))
    whole = found["low"] == found["high"] == found["step"] == step
    shown = f"{found['step']} from {found['source']}, values {found['low']:g} to {found['high']:g}"
    report.figure(f"rethrow {rethrow}: restored step", shown, expected=f"{step}, untorn", met=whole)


def _describe(code: int | None, errors: str) -> str:
    if code is None:
        return "nothing: it hangs"
    last = errors.strip().splitlines()[-1][:120] if errors.strip() else "no message"
    return f"SIGABRT: {last}" if code == -6 else f"exit code {code}: {last}"
