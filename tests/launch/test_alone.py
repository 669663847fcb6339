"""A job of one node alone: no start shares a store with the one before."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry

from rekindle.faults.torchelastic import FRESH_STORE, warn_of_reused_store
from rekindle.launch.rendezvous import entry
from rekindle.launch.rendezvous.alone import Alone
from rekindle.launch.rendezvous.handler import Rendezvous
from tests.launch.launcher import Launcher

KILLED_AT_ONCE = """
import os, signal, sys, time
import torch.distributed as dist
import rekindle
dist.init_process_group("gloo")
rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
left = store.add("starts", 1)  # the first rank's answer is 1, that of another one 2
ckpt = rekindle.Checkpointer(sys.argv[1], {"model": __import__("torch").nn.Linear(2, 2)})
step = ckpt.restore() + 1
dist.barrier()
ckpt.save(step, wait="memory")
with open(f"starts-{rank}", "a") as notes:
    print(left, os.environ["MASTER_PORT"], os.getpid(), file=notes, flush=True)
if step <= KILLS:
    if rank == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
ckpt.close()
"""


@pytest.mark.parametrize(
    ("options", "setting", "ranks", "kills"),
    [(("--no-warm",), "0", 1, 1), pytest.param((), "", 2, 2, marks=pytest.mark.campaign(20))],
)
def test_ranks_that_are_started_again_find_a_new_store(
    tmp_path: Path, options: tuple[str, ...], setting: str, ranks: int, kills: int
) -> None:
    """Whatever torch does with its own setting: the last rank is killed in some starts, once it has made a step."""
    script = tmp_path / "train.py"
    script.write_text(KILLED_AT_ONCE.replace("KILLS", str(kills)))
    kept = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": setting, "OMP_NUM_THREADS": "1"}
    with Launcher(tmp_path, *options, f"--nproc-per-node={ranks}", script, "root", **kept) as launcher:
        assert launcher.process.wait(150) == 0, launcher.output
        launcher.read_out()
    assert len(launcher.restarts) == kills, "one for each kill"
    assert all("was killed by SIGKILL" in line for line in launcher.restarts), launcher.output
    assert "reuses its store" not in launcher.output and "one store for all starts" not in launcher.output
    notes = [[line.split() for line in (tmp_path / f"starts-{rank}").read_text().splitlines()] for rank in range(ranks)]
    starts = [{int(words[0]) for words in each} for each in zip(*notes, strict=True)]
    assert starts == [{*range(1, ranks + 1)}] * (kills + 1), (
        "what the ranks of a start find in their store is their own"
    )
    assert all(len({words[1] for words in each}) == 1 for each in zip(*notes, strict=True)), "and it is the same one"


def test_it_is_made_where_no_other_node_can_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FRESH_STORE, "")  # so that it is taken back: a handler sets it for the ranks
    entry.register()
    made = rendezvous_handler_registry.create_handler(RendezvousParameters("rekindle", "", "job", 1, 1))
    assert isinstance(made, Alone) and made.get_backend() == "rekindle" and made.get_run_id() == "job"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    other = rendezvous_handler_registry.create_handler(RendezvousParameters("rekindle", endpoint, "job", 1, 1))
    assert isinstance(other, Rendezvous), "a spare may come there"
    other._hub.stop()


def test_a_round_comes_at_once_or_after_its_pause_and_has_a_store_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FRESH_STORE, "")
    alone = Alone(RendezvousParameters("rekindle", "", "job", 1, 1))
    assert os.environ[FRESH_STORE] == "1" and alone.use_agent_store
    first = alone.next_rendezvous()
    first.store.set("key", "of the first start")
    assert alone.is_first_round and (first.rank, first.world_size) == (0, 1)
    alone.pause = 0.3
    began = time.monotonic()
    second = alone.next_rendezvous()
    assert time.monotonic() - began >= 0.3 and alone.pause == 0 and not alone.is_first_round
    assert not second.store.check(["key"])
    assert alone.num_nodes_waiting() == 0 and alone.await_ends(60.0) and not alone.is_closed() and alone.shutdown()


def test_only_ranks_of_plain_torchrun_are_advised_to_take_another_launcher(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in (FRESH_STORE, "REKINDLE_LAUNCH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    warn_of_reused_store(0)
    assert "launch with 'rekindle run'" in caplog.text
    caplog.clear()
    monkeypatch.setenv("REKINDLE_LAUNCH", "/tmp/launch")
    warn_of_reused_store(0)
    assert not caplog.text


def test_who_asks_for_torchs_static_rendezvous_hears_what_that_means(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, rekindle\nrekindle.Checkpointer('root', {'model': torch.nn.Linear(2, 2)}).close()\n"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    options = ("--no-warm", "--rdzv-backend=static", f"--rdzv-endpoint=127.0.0.1:{port}", script)
    with Launcher(tmp_path, *options, standalone=False) as launcher:
        assert launcher.process.wait(100) == 0, launcher.output
        launcher.read_out()
    assert launcher.output.count("one store for all starts") == 1 and "reuses its store" not in launcher.output
