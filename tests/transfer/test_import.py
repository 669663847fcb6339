"""Tests that other programs' files become checkpoints, and that files which can't are refused and run no code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import rekindle
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.transfer.importing import import_checkpoint
from tests import forked
from tests.transfer.helpers import FORMATS, Rank, all_of, assert_same, done, named, restored, run, same, taken_in, write
from tests.transfer.test_export import Counted, refused
from tests.unreadable import unreadable

W = torch.arange(24.0).view(6, 4)


class Odd:
    """A value without a type in the format."""

    def __eq__(self, other: object) -> bool:
        return type(other) is Odd


def model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))


def trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    module = model(seed)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1 * seed)
    module(torch.randn(5, 4)).square().mean().backward()
    optimizer.step()
    return module, optimizer


def state_of(root: Path, out: Path) -> Any:
    done("export", root, out, "--format", "torch")
    return torch.load(out, weights_only=True)


@pytest.fixture
def theirs() -> torch.nn.Module:
    return trained(1)[0]


# -- safetensors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["file", "directory", "index"])
def test_safetensors_of_others(theirs: torch.nn.Module, root: Path, memory: Path, tmp_path: Path, shape: str) -> None:
    tensors = theirs.state_dict()
    hub = tmp_path / "hub"
    hub.mkdir()
    if shape == "index":
        names = list(tensors)
        parts = {"a-1.safetensors": names[:3], "a-2.safetensors": names[3:]}
        for file, some in parts.items():
            save_file({name: tensors[name] for name in some}, hub / file)
        weights = {name: file for file, some in parts.items() for name in some}
        (hub / "a.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
        save_file({"other": W}, hub / "unrelated.safetensors")
    else:
        save_file(tensors, hub / "anything.safetensors", metadata={"format": "pt"})
    source = hub / "anything.safetensors" if shape == "file" else hub
    told = taken_in(source, root, 0)
    assert (told["entries"], told["format"], told["tensors"]) == (["model"], "safetensors", len(tensors))
    fresh = model(2)
    restored(root, {"model": fresh}, 0)
    assert_same(dict(fresh.state_dict()), dict(tensors))


def test_codes_that_only_newer_writers_use(root: Path, memory: Path, tmp_path: Path) -> None:
    entries = {"c": ("C64", [2], [0, 16]), "e": ("F8_E8M0", [3], [16, 19]), "odd": ("BF16", [1, 1], [19, 21])}
    table = {name: dict(zip(("dtype", "shape", "data_offsets"), entry, strict=True)) for name, entry in entries.items()}
    head = json.dumps(table).encode()
    (tmp_path / "x").write_bytes(len(head).to_bytes(8, "little") + head + bytes(range(21)))
    taken_in(tmp_path / "x", root, 1, "--as", "odd.one")
    state = state_of(root, tmp_path / "out.pt")["odd.one"]
    assert state["c"].dtype == torch.complex64 and state["e"].dtype == torch.float8_e8m0fnu
    assert same(state["odd"], torch.frombuffer(bytearray([19, 20]), dtype=torch.bfloat16).view(1, 1))


def test_safetensors_that_are_not_right(root: Path, memory: Path, tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    hub.mkdir()
    one = hub / "one.safetensors"
    save_file({"w": W}, one)
    sound = one.read_bytes()
    one.write_bytes(sound[:-1])
    assert "does not lie where the header says" in refused(4, "import", one, root, 1)
    one.write_bytes(sound.replace(b'"F32"', b'"F4",').replace(b'"F4",,', b'"F4" ,'))
    assert "has dtype F4, which has no type" in refused(2, "import", one, root, 1)
    one.write_bytes(sound.replace(b'"shape"', b'"shap_"'))
    assert "is not described" in refused(4, "import", one, root, 1)
    one.write_bytes(sound.replace(b'"dtype"', b'"dtype '))
    assert "is not readable as safetensors" in refused(4, "import", one, root, 1)
    one.write_bytes(sound)
    save_file({"w": W}, hub / "two.safetensors")
    assert "holds 2 files (one.safetensors, two.safetensors" in refused(2, "import", hub, root, 1)
    index = hub / "x.safetensors.index.json"
    index.write_text('{"weight_map": {"w": "one.safetensors", "b": "two.safetensors"}}')
    assert "two.safetensors: lacks 'b'" in refused(4, "import", hub, root, 1)
    index.write_text('{"weight_map": {"w": "three.safetensors"}}')
    assert "three.safetensors: is missing" in refused(3, "import", hub, root, 1)
    index.write_text("[]")
    assert "is not readable as an index" in refused(4, "import", hub, root, 1)
    assert not root.exists(), "nothing half-made stays, not even the root"


# -- torch.save ------------------------------------------------------------------------------------------------------


def test_what_scripts_save_with_torch(root: Path, memory: Path, tmp_path: Path) -> None:
    """A dictionary of state_dicts, and a few values beside."""
    module, optimizer = trained(1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    torch.save(
        {
            "model": module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "epoch": 4,
            "best": float("inf"),
        },
        tmp_path / "theirs.pt",
    )
    told = taken_in(tmp_path / "theirs.pt", root, 12)
    assert told["entries"] == ["model", "optimizer", "scheduler", "values"] and told["format"] == "torch"
    fresh, its_optimizer = trained(2)
    progress = rekindle.Values()
    its_scheduler = torch.optim.lr_scheduler.StepLR(its_optimizer, 5)
    state = {"model": fresh, "optimizer": its_optimizer, "scheduler": its_scheduler, "values": progress}
    restored(root, state, 12)
    assert_same(dict(fresh.state_dict()), dict(module.state_dict()))
    assert its_optimizer.param_groups[0]["lr"] == 0.1 and its_scheduler.step_size == 3
    for ours, theirs in zip(its_optimizer.state.values(), optimizer.state.values(), strict=True):
        assert_same(ours, theirs)
    assert progress.state_dict() == {"epoch": 4, "best": float("inf")}


def test_flat_files_parameters_and_views(root: Path, memory: Path, tmp_path: Path) -> None:
    base = torch.randn(4, 6)
    flat = OrderedDict(
        whole=base, part=base[1:3, ::2], turned=base.t(), param=torch.nn.Parameter(base * 2), step=5, tied=base
    )
    torch.save(flat, tmp_path / "flat.pt")
    assert taken_in(tmp_path / "flat.pt", root)["tensors"] == 4
    state = state_of(root, tmp_path / "out.pt")["model"]
    assert type(state) is OrderedDict and list(state) == list(flat) and state["step"] == 5
    assert_same({k: v for k, v in state.items() if k != "step"}, {k: v for k, v in flat.items() if k != "step"})

    torch.save({"state": {0: {"m": W}}, "param_groups": [{"params": [0]}]}, tmp_path / "optimizer.pt")
    assert taken_in(tmp_path / "optimizer.pt", root, 2, "--as", "optimizer")["entries"] == ["optimizer"]
    assert torch.equal(state_of(root, tmp_path / "again.pt")["optimizer"]["state"][0]["m"], W)


def test_a_file_that_would_run_code_runs_none(root: Path, memory: Path, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "sprung"),)

    torch.save({"model": {"w": W}, "x": Trap()}, tmp_path / "trap.pt")
    for more in ([], ["--allow-pickle"]):
        told = refused(2, "import", tmp_path / "trap.pt", root, 1, *more)
        assert "loading it would run code, which an import never does" in told
    assert not (tmp_path / "sprung").exists() and not root.exists()


def test_torch_files_that_are_not_right(root: Path, memory: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.pt"
    torch.save({"w": W}, file)
    file.write_bytes(file.read_bytes()[:-100])
    assert "is not readable as a torch.save file" in refused(4, "import", file, root, 1)
    torch.save([W], file)
    assert "holds a list, where a dictionary of state should be" in refused(2, "import", file, root, 1)
    torch.save({"w": W}, file, _use_new_zipfile_serialization=False)
    assert "of torch 1.6 or newer" in refused(2, "import", file, root, 1)
    torch.save({"model": {"w": W.to_sparse()}}, file)
    assert "model.w: a tensor of layout torch.sparse_coo" in refused(2, "import", file, root, 1)
    torch.save({"values": {"a": 1}, "epoch": 1}, file)
    assert "has 'epoch' beside an entry 'values'" in refused(2, "import", file, root, 1)
    file.write_bytes(b"")
    assert "is neither a safetensors file" in refused(2, "import", file, root, 1)
    assert "is neither a safetensors file" in refused(2, "import", tmp_path, root, 1)
    assert "is not there" in refused(3, "import", tmp_path / "none", root, 1)
    assert not root.exists()


# -- DCP -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def by_dcp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint by DCP of a module and an optimizer of two ranks that have half a tensor each."""
    out = tmp_path_factory.mktemp("dcp") / "out"
    code = (
        "import os, sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.tensor import Shard, distribute_tensor\n"
        "dist.init_process_group('gloo', init_method=sys.argv[2], rank=int(sys.argv[3]), world_size=2)\n"
        "mesh = init_device_mesh('cpu', (2,))\n"
        "sharded = distribute_tensor(torch.arange(24.0).view(6, 4), mesh, [Shard(1)])\n"
        "kept = {'momentum': torch.ones(3), 'n': 7}\n"
        "groups = [{'lr': 0.5, 'params': [0, 1]}]\n"
        "state = {'model': {'w': sharded, 'b': torch.ones(3, dtype=torch.bfloat16)},\n"
        "         'optimizer': {'state': {0: kept, 1: dict(kept)}, 'param_groups': groups}, 'epoch': 3}\n"
        "dcp.save(state, checkpoint_id=sys.argv[1])\n"
        "dist.barrier()\n"
        "os._exit(0)\n"  # torch's threads may otherwise end the process by an abort
    )
    meeting = f"file://{out.parent}/met"
    ranks = [forked.Program(forked.Code(code), out, meeting, rank) for rank in range(2)]
    told = [process.communicate(timeout=100) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], told
    return out


@pytest.mark.campaign(seconds=9)
def test_dcp_of_others(by_dcp: Path, root: Path, memory: Path, tmp_path: Path) -> None:
    told = refused(2, "import", by_dcp, root, 1)
    assert "metadata and values are pickles" in told and "--allow-pickle allows it" in told and not root.exists()
    assert taken_in(by_dcp, root)["entries"] == ["model", "optimizer", "values"]
    state = state_of(root, tmp_path / "out.pt")
    assert torch.equal(state["model"]["w"], W) and same(state["model"]["b"], torch.ones(3, dtype=torch.bfloat16))
    assert state["values"] == {"epoch": 3}
    assert list(state["optimizer"]["state"]) == [0, 1], "numbers again, of which DCP makes texts"
    assert state["optimizer"]["state"][1]["n"] == 7
    assert state["optimizer"]["param_groups"] == [{"lr": 0.5, "params": [0, 1]}]

    dcp.save({"w": W, "list": [W, {"x": W + 1}]}, checkpoint_id=tmp_path / "flat")
    taken_in(tmp_path / "flat", root, 2)
    state = state_of(root, tmp_path / "flat.pt")["model"]
    assert torch.equal(state["w"], W) and torch.equal(state["list"][1]["x"], W + 1)


def test_dcp_that_is_not_right(by_dcp: Path, root: Path, memory: Path, tmp_path: Path) -> None:
    dcp.save({"w": W}, checkpoint_id=tmp_path / "x")
    (data,) = (tmp_path / "x").glob("*.distcp")
    data.unlink()
    assert "can't be loaded" in refused(4, "import", tmp_path / "x", root, 1, "--allow-pickle")
    (tmp_path / "x" / ".metadata").write_bytes(b"junk")
    assert "is not readable" in refused(4, "import", tmp_path / "x", root, 1, "--allow-pickle")
    assert not root.exists()


# -- ours, damaged or changed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["safetensors", "dcp"])
def test_an_export_of_ours_is_compared_with_its_checksums(root: Path, memory: Path, tmp_path: Path, form: str) -> None:
    weight = torch.full((1000,), 2.5)
    write(root, [Rank([all_of("model.w", weight)], named("model.w"))])
    out, back = tmp_path / "out", tmp_path / "back"
    done("export", root, out, "--format", form)
    (data,) = [path for path in out.iterdir() if path.name not in ("rekindle.json", ".metadata")]
    sound = data.read_bytes()
    at = sound.index(weight[:100].numpy().tobytes())
    data.write_bytes(sound[: at + 1] + b"\1" + sound[at + 2 :])
    told = refused(4, "import", out, back, 1, "--allow-pickle")
    assert "'model.w' differs from its checksum" in told and "remove rekindle.json" in told and not back.exists()

    note = out / "rekindle.json"
    text = note.read_bytes()
    note.write_bytes(text.replace(b"float32", b"float64"))
    assert "damaged" in refused(4, "import", out, back, 1, "--allow-pickle")
    note.unlink()
    taken_in(out, back)  # on purpose, then
    assert not torch.equal(state_of(back, tmp_path / "out.pt")["model"].popitem()[1], weight)

    note.write_bytes(text)
    data.write_bytes(sound)
    if form == "safetensors":
        save_file({"model.v": weight}, data)
        assert "lack 'model.v'" in refused(4, "import", out, tmp_path / "again", 1)
        save_file({"model.w": weight.double()}, data)
        assert "has another dtype or shape" in refused(4, "import", out, tmp_path / "again", 1)
        data.write_bytes(sound)
    told = refused(2, "import", out, tmp_path / "again", 1, "--as", "x", "--allow-pickle")
    assert "names its entries itself (model)" in told


# -- the root --------------------------------------------------------------------------------------------------------


def one(root: Path, step: int, value: float) -> None:
    write(root, [Rank([all_of("model.w", torch.full((2,), value))], named("model.w"))], step)


def test_an_import_goes_on_from_no_less_than_there_is(root: Path, memory: Path, tmp_path: Path) -> None:
    one(root, 5, 1.0)
    one(root, 6, 1.0)
    save_file({"w": torch.full((2,), 7.0)}, tmp_path / "x.safetensors")
    with unreadable(root / "step-0000000006" / "checkpoint.json"):
        told = refused(3, "import", tmp_path / "x.safetensors", root, 7)
        assert "step 6 is on storage, and can't be read" in told
    taken_in(tmp_path / "x.safetensors", root, 7)


def test_an_import_goes_on_from_what_is_there(root: Path, memory: Path, tmp_path: Path) -> None:
    one(root, 5, 1.0)
    save_file({"w": torch.full((2,), 7.0)}, tmp_path / "x.safetensors")
    assert "has step 5 already" in refused(2, "import", tmp_path / "x.safetensors", root, 5)
    assert "has step 5 already" in refused(2, "import", tmp_path / "x.safetensors", root, 4)
    taken_in(tmp_path / "x.safetensors", root, 6)
    listed = done("ls", root)
    assert [(e["step"], e["condition"], e["generation"], e["continued_from"]) for e in listed] == [
        (6, "complete", 2, 5),
        (5, "complete", 1, None),
    ]
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(torch.zeros(2))
    checkpointer = rekindle.Checkpointer(root, {"model": module}, keep=3)
    assert checkpointer.restore() == 6 and module.w.tolist() == [7.0, 7.0]
    checkpointer.save(7, wait="durable")
    checkpointer.close()
    stored = [(e["step"], e["condition"]) for e in done("ls", root) if e["place"] == "storage"]
    assert stored == [(7, "complete"), (6, "complete"), (5, "complete")]


def test_not_while_a_job_runs(root: Path, memory: Path, tmp_path: Path) -> None:
    save_file({"w": W}, tmp_path / "x.safetensors")
    job = JobDir.of(root, memory_base(memory))
    job.create()
    code = "import fcntl, sys, time; fcntl.flock(int(sys.argv[1]), fcntl.LOCK_EX); print(1, flush=True); time.sleep(60)"
    with open(job.paths.rank_lock(0), "w") as held:
        fd = held.fileno()
        child = subprocess.Popen([sys.executable, "-c", code, str(fd)], pass_fds=[fd], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline()
    told = refused(rekindle.BusyError.exit_code, "import", tmp_path / "x.safetensors", root, 1)
    assert "a job runs there" in told and "rekindle stop ROOT" in told and not root.exists()
    child.kill()
    child.wait()
    child.stdout.close()


def test_a_full_disk_leaves_the_root_as_it_was(
    memory: Path, tmp_path: Path, small_tmpfs: Callable[[int], Path]
) -> None:
    save_file({"w": torch.randn(3, 1 << 19)}, tmp_path / "x.safetensors")
    for room in (4 << 20, 9 << 20):  # for nothing; for what is put together, but not for the checkpoint too
        disk = small_tmpfs(room)
        one(disk / "run", 1, 1.0)
        before = os.listdir(disk / "run")
        result = run("import", tmp_path / "x.safetensors", disk / "run", 2)
        assert result.exit_code == 1 and "No space left on device" in result.stderr
        assert os.listdir(disk / "run") == before
        assert run("verify", disk / "run").exit_code == 0


def test_a_checkpoint_of_ours_is_told_from_others(root: Path, memory: Path, tmp_path: Path) -> None:
    one(root, 5, 1.0)
    told = refused(2, "import", root / "step-0000000005", tmp_path / "back", 5)
    assert "is a checkpoint of Rekindle's already" in told


@pytest.mark.parametrize("form", FORMATS)
def test_progress_ends_where_it_said(root: Path, memory: Path, tmp_path: Path, form: str) -> None:
    one(root, 5, 1.0)
    done("export", root, tmp_path / "out", "--format", form)
    progress, back = Counted(), tmp_path / "back"
    import_checkpoint(
        tmp_path / "out", JobDir.of(back, memory_base(memory)), back, 5, None, progress, allow_pickle=True
    )
    assert 0 < progress.total == progress.done


def test_pickles_are_opened_only_where_that_was_asked_for(root: Path, memory: Path, tmp_path: Path) -> None:
    values = rekindle.Values(odd=Odd())
    checkpointer = rekindle.Checkpointer(root, {"values": values}, allow_pickle=True)
    checkpointer.save(1, wait="durable")
    checkpointer.close()
    for form in FORMATS:
        done("export", root, tmp_path / form, "--format", form)
        taken_in(tmp_path / form, tmp_path / f"back-{form}", 1, "--allow-pickle")
        fresh = rekindle.Values()
        checkpointer = rekindle.Checkpointer(tmp_path / f"back-{form}", {"values": fresh}, allow_pickle=True)
        assert checkpointer.restore(allow_pickle=True) == 1 and fresh.odd == Odd()
        checkpointer.close()
