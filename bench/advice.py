"""Example of advice: ``python bench/advice.py``. A job trains for three minutes by itself, and is advised.

Its model has 9 million parameters, which with AdamW's state makes 108 MB. Linux only.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

_DOCS = Path(__file__).resolve().parent.parent / "docs"
_TRAIN = """
import sys, torch, rekindle
model = torch.nn.Sequential(*(torch.nn.Linear(1500, 1500) for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer}
ckpt = rekindle.Checkpointer(sys.argv[1], state, snapshot_every="auto", persist_every="auto", persist_seconds=4)
step = ckpt.restore()
with ckpt.guard():
    while True:
        step += 1
        optimizer.zero_grad()
        model(torch.randn(64, 1500)).square().mean().backward()
        optimizer.step()
        ckpt.step(step)
"""


@click.command(help=__doc__)
@click.option("--seconds", default=170.0, show_default=True, help="Time that the job trains.")
@click.option("--docs", is_flag=True, help="Put the advice into docs/advice.md.")
def main(seconds: float, docs: bool) -> None:
    from report import put_blocks

    load = os.getloadavg()[0]
    with (
        tempfile.TemporaryDirectory(prefix="rekindle-bench-", dir="/dev/shm") as memory,
        tempfile.TemporaryDirectory(prefix="rekindle-bench-") as root,
    ):
        environment = {**os.environ, "REKINDLE_MEMORY": memory}
        job = subprocess.Popen([sys.executable, "-c", _TRAIN, root], env=environment)
        rekindle = [sys.executable, "-m", "rekindle"]
        try:
            time.sleep(seconds)
            told = [*rekindle, "advise", root]
            advice = subprocess.run(told, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
        finally:
            job.terminate()
            job.wait()
            subprocess.run([*rekindle, "stop", "--discard", root], env=environment, check=True)
    click.echo(advice)
    conditions = f"On {os.cpu_count()} cores, with a load of {load:.1f} by other programs before it:"
    click.echo(conditions)
    if docs:
        for name in put_blocks(_DOCS / "advice.md", {"advice": f"{conditions}\n\n```\n{advice.rstrip()}\n```"}):
            click.echo(f"docs/advice.md has no place for {name!r}")


if __name__ == "__main__":
    main()
