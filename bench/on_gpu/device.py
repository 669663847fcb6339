"""Describes the device under test, in a process of its own: whoever runs experiments must not use it."""

from __future__ import annotations

import platform
from pathlib import Path

from on_gpu.cases import Case, Speaker

__all__ = ["describe_device", "describe_here"]


def describe_here(speaker: Speaker) -> None:
    import torch

    if not torch.cuda.is_available():
        speaker.say(missing="torch sees no CUDA device" if torch.version.cuda else "this torch was built without CUDA")
        return
    from on_gpu.cuda import Driver

    found = torch.cuda.get_device_properties(0)
    torch.zeros(1, device="cuda")
    driver = Driver()
    speaker.say(
        device=found.name,
        device_memory_bytes=found.total_memory,
        devices=torch.cuda.device_count(),
        capability=f"{found.major}.{found.minor}",
        cuda=torch.version.cuda,
        driver=driver.version,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
        attributes=driver.attributes(),
        link=_link(),
        system=platform.platform(),
        huge_pages=_text("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
    )


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return "unknown"


def _link() -> list[str]:
    """Returns speed and width of NVIDIA's PCI devices, and their NUMA nodes, as the kernel tells."""
    found = []
    for device in sorted(Path("/sys/bus/pci/devices").glob("*")):
        if _text(f"{device}/vendor") == "0x10de":
            names = ("current_link_speed", "current_link_width", "numa_node")
            found.append(", ".join(_text(f"{device}/{name}") for name in names))
    return found


def describe_device() -> dict[str, object]:
    """Returns the description; with the key "missing", which says why, where there is no device."""
    with Case("on_gpu.device:describe_here") as case:
        return case.result(120)
