"""DCP code that saves and loads through Rekindle: what one process puts in, it or any other gets out again."""

from __future__ import annotations

import copy
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    HuggingFaceStorageReader,
)
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import rekindle
from rekindle.errors import NotFoundError, StateMismatchError, UnsupportedValueError, UsageError
from rekindle.format.names import step_dir
from rekindle.integrations.dcp import RekindleReader, RekindleStager, RekindleWriter
from rekindle.integrations.dcp.names import place_of, step_of
from rekindle.memory.job_dir import JobDir, memory_base
from tests.faults.harness import wait_for

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def awkward() -> dict[str, Any]:
    """A tensor, and a value, of every kind that a state dict may hold."""
    torch.manual_seed(1)
    tied = torch.randn(4, 3)
    return {
        "model": {"weight": tied, "head.weight": tied, "low": torch.randn(4, 2, dtype=torch.bfloat16)},
        "turned": torch.randn(6, 7).t(),
        "part": torch.randn(10, 10)[2:5, 3:9],
        "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "flags": torch.tensor([True, False]),
        "waves": torch.randn(3, dtype=torch.complex64),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "small": torch.randn(8).to(torch.float8_e5m2),
        "nested": {"list": [1, "two", {"deep": torch.arange(5), "also": None}], "plain": [1, 2, 3], "pair": (1, 2)},
        "$key": {"$value": 3},
        "step": 7,
        "text": "ö",
    }


def blank(node: Any) -> Any:
    """The same state without what was saved."""
    if isinstance(node, torch.Tensor):
        return torch.zeros_like(node)
    if isinstance(node, dict):
        return {key: blank(value) for key, value in node.items()}
    if isinstance(node, list):
        return [blank(item) for item in node]
    return None


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def load(root: Path, like: dict[str, Any], **more: Any) -> dict[str, Any]:
    state = blank(like)
    dcp.load(state, storage_reader=RekindleReader(root), **more)
    return state


def failure(caught: pytest.ExceptionInfo[CheckpointException]) -> BaseException:
    """What a rank raised inside of DCP."""
    return caught.value.failures[0][0]


def steps(root: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in root.glob("step-??????????"))


# -- what goes in comes out -----------------------------------------------------------------------------------------


def test_every_kind_of_tensor_and_value_comes_back(memory: Path, root: Path) -> None:
    state = awkward()
    dcp.save(state, storage_writer=RekindleWriter(root))
    assert same(load(root, state), state)


def test_what_memory_held_is_on_storage_after_close_and_the_memory_is_given_back(memory: Path, root: Path) -> None:
    state, writer = awkward(), RekindleWriter(root)
    dcp.save(state, storage_writer=writer)
    job = JobDir.of(root, memory_base(memory))
    assert job.held_bytes()
    writer.close()
    wait_for(lambda: not job.path.exists())
    assert same(load(root, state), state)


def test_the_command_line_knows_these_checkpoints(memory: Path, root: Path) -> None:
    writer = RekindleWriter(root)
    dcp.save(awkward(), checkpoint_id="step-30", storage_writer=writer)
    writer.close()

    def say(*words: str) -> Any:
        command = [sys.executable, "-m", "rekindle", *words, "--json"]
        return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)

    assert [entry["step"] for entry in say("ls", str(root))] == [30]
    say("verify", str(root))
    names = json.dumps(say("inspect", str(root)))
    assert "model.head.weight" in names and "nested.list" in names


def test_torch_loads_what_was_saved(memory: Path, root: Path) -> None:
    """The dtypes that torch's own reader knows, tied ones by both of their names."""
    whole, writer = awkward(), RekindleWriter(root)
    kept = ("model", "turned", "part", "channels", "parameter", "scalar", "empty", "nested")
    state = {name: whole[name] for name in kept}
    dcp.save(state, storage_writer=writer)
    writer.close()
    del state["nested"]
    loaded = blank(state)
    dcp.load(loaded, storage_reader=HuggingFaceStorageReader(str(root / step_dir(1))))
    assert same(loaded, state)


def test_a_checkpoint_is_loaded_without_a_state_to_begin_with(memory: Path, root: Path) -> None:
    """The nesting, lists included, is in the receipts, not in a pickle."""
    state = awkward()
    dcp.save(state, storage_writer=RekindleWriter(root))
    assert same(_load_state_dict_from_keys(storage_reader=RekindleReader(root)), state)
    some = _load_state_dict_from_keys({"nested", "model.low"}, storage_reader=RekindleReader(root))
    assert same(some, {"nested": state["nested"], "model": {"low": state["model"]["low"]}})


def test_metadata_describes_tensors_and_values(memory: Path, root: Path) -> None:
    state = {"a": torch.randn(3, 4, dtype=torch.float64), "n": 1}
    dcp.save(state, storage_writer=RekindleWriter(root))
    found = RekindleReader(root).read_metadata().state_dict_metadata
    assert isinstance(found["n"], BytesStorageMetadata)
    assert isinstance(found["a"], TensorStorageMetadata)
    assert found["a"].properties.dtype == torch.float64 and found["a"].size == (3, 4)
    assert [(chunk.offsets, chunk.sizes) for chunk in found["a"].chunks] == [((0, 0), (3, 4))]


class Told(DefaultSavePlanner):
    """Keeps what planners are told of the storage."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.told = storage_meta


def test_storage_meta_tells_saves_and_loads_apart(memory: Path, root: Path) -> None:
    writer, told = RekindleWriter(root), []
    for step in (3, None):
        planner = Told()
        found = dcp.save({"n": 1}, checkpoint_id=step, storage_writer=writer, planner=planner)
        assert found.storage_meta.checkpoint_id == str(root / step_dir(step or 4))
        assert planner.told.checkpoint_id == str(root / step_dir(3) if step else root)
        assert found.storage_meta.save_id == planner.told.save_id
        told.append(planner.told.save_id)
    reader = RekindleReader(root)
    loads = []
    for step in (3, 4):
        reader.reset(step)
        meta = reader.read_metadata().storage_meta
        assert meta.checkpoint_id == reader.checkpoint_id == str(root / step_dir(step))
        loads.append((meta.save_id, meta.load_id))
    assert len(set(told)) == 2 and len({id for pair in loads for id in pair}) == 4


def test_tensors_of_several_blocks_and_other_dtypes_are_converted(memory: Path, root: Path) -> None:
    state = {"big": torch.randn(5 << 20), "n": torch.arange(10)}
    dcp.save(state, storage_writer=RekindleWriter(root))
    other = {"big": torch.zeros(5 << 20, dtype=torch.float64), "n": torch.zeros(10, dtype=torch.int32)}
    dcp.load(other, storage_reader=RekindleReader(root))
    assert torch.equal(other["big"], state["big"].double()) and torch.equal(other["n"], state["n"].int())
    assert same(load(root, state), state)


def test_what_fits_nowhere_is_refused_by_name(memory: Path, root: Path) -> None:
    writer = RekindleWriter(root)
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"thin": torch.eye(3).to_sparse()}, storage_writer=writer)
    assert isinstance(failure(caught), UnsupportedValueError) and "thin" in str(caught.value)
    dcp.save({"a": torch.zeros(3)}, storage_writer=writer)
    with pytest.raises(CheckpointException, match="Size mismatch"):
        load(root, {"a": torch.zeros(4)})
    with pytest.raises(CheckpointException, match="Missing key"):
        load(root, {"b": torch.zeros(4)})


class Halves(DefaultSavePlanner):
    """Saves what it is given in half precision."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        given = super().transform_object(write_item, object)
        return given if isinstance(given, io.BytesIO) else given.to(torch.float16)


class Renamed(DefaultLoadPlanner):
    """Loads what is called ``old.x`` into what is called ``x``."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner({"old": state_dict}, metadata, is_coordinator)


def test_planners_have_their_say(memory: Path, root: Path) -> None:
    state = {"old": {"x": torch.randn(8)}}
    dcp.save(state, storage_writer=RekindleWriter(root), planner=Halves())
    loaded = {"x": torch.zeros(8)}
    dcp.load(loaded, storage_reader=RekindleReader(root), planner=Renamed())
    assert torch.equal(loaded["x"], state["old"]["x"].half().float())
    more = {"old": {"x": torch.zeros(8), "y": torch.ones(2)}}
    dcp.load(more, storage_reader=RekindleReader(root), planner=DefaultLoadPlanner(allow_partial_load=True))
    assert more["old"]["x"].any() and more["old"]["y"].all()


def test_plans_that_dcp_keeps_from_save_to_save(memory: Path, root: Path) -> None:
    writer = RekindleWriter(root)
    for step in (10, 20, 30):
        state = {"a": torch.full((3,), float(step)), "n": step}
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, checkpoint_id=f"step-{step}", storage_writer=writer, planner=planner)
        assert same(load(root, state), state)
    assert same(load(root, state, checkpoint_id="step-10"), {"a": torch.full((3,), 10.0), "n": 10})


def test_what_a_checkpointer_saved_is_loaded_by_dcp(memory: Path, root: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "best": rekindle.Values(loss=0.5, seen={1, 2})}
    ckpt = rekindle.Checkpointer(root, state)
    ckpt.save(5)
    ckpt.close()
    expected = {name: copy.deepcopy(entry.state_dict()) for name, entry in state.items()}
    expected["optimizer"] = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    loaded = blank(expected)
    for group in loaded["optimizer"]["param_groups"]:
        group["params"] = []
    dcp.load(loaded, storage_reader=RekindleReader(root))
    assert same(loaded["model"], dict(expected["model"])) and same(loaded["best"], expected["best"])
    assert same(loaded["optimizer"]["state"], expected["optimizer"]["state"])
    for ours, theirs in zip(loaded["optimizer"]["param_groups"], expected["optimizer"]["param_groups"], strict=True):
        assert sorted(ours.pop("params")) == sorted(theirs.pop("params")) and same(ours, theirs)


# -- which step -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1200", "step-1200", "step_1200", "global_step1200", "{root}/step-0000001200", 1200])
def test_a_checkpoint_id_names_a_step(root: Path, name: Any) -> None:
    given = name.format(root=root) if isinstance(name, str) else name
    assert step_of(given, root) == 1200


@pytest.mark.parametrize("name", ["final", "", "step-1200-of-2", "elsewhere/step-1200"])
def test_a_checkpoint_id_that_names_none_is_refused(root: Path, name: str) -> None:
    with pytest.raises(UsageError):
        step_of(name, root)


def test_a_path_names_the_root_and_perhaps_a_step(root: Path) -> None:
    assert place_of(root) == (root, None) and place_of(root / "step-12") == (root, 12)
    assert step_of(str(root), root) is None
    assert RekindleWriter.validate_checkpoint_id(str(root / "step-12"))
    assert RekindleReader.validate_checkpoint_id(root), "as DCP asks before it makes a writer or reader of a path"
    assert not RekindleReader.validate_checkpoint_id("http://bucket/step-12")
    assert not RekindleWriter.validate_checkpoint_id("abc://abc.abc")


def test_steps_are_counted_or_named(memory: Path, root: Path) -> None:
    def save(value: int, **more: Any) -> None:
        dcp.save({"n": value}, storage_writer=RekindleWriter(root), **more)

    save(1)
    save(20, checkpoint_id="step-20")
    save(21)
    dcp.save({"n": 40}, storage_writer=RekindleWriter(root / "step-40"))
    for step in (1, 20, 21, 40):
        assert load(root, {"n": 0}, checkpoint_id=str(root / f"step-{step}")) == {"n": step}
    assert load(root, {"n": 0}) == {"n": 40}
    with pytest.raises(CheckpointException) as caught:
        load(root, {"n": 0}, checkpoint_id="step-30")
    assert isinstance(failure(caught), NotFoundError) and "[1, 20, 21, 40]" in str(failure(caught))


def test_no_checkpoint_is_written_over(memory: Path, root: Path) -> None:
    writer = RekindleWriter(root)
    dcp.save({"n": 20}, checkpoint_id="20", storage_writer=writer)
    for step in ("20", "19"):
        with pytest.raises(CheckpointException, match="steps must grow") as caught:
            dcp.save({"n": 0}, checkpoint_id=step, storage_writer=writer)
        assert isinstance(failure(caught), UsageError)
    writer.close()
    with pytest.raises(CheckpointException, match="has been closed"):
        dcp.save({"n": 0}, storage_writer=writer)
    with pytest.raises(CheckpointException, match="steps must grow"):
        dcp.save({"n": 0}, checkpoint_id="20", storage_writer=RekindleWriter(root))
    assert load(root, {"n": 0}) == {"n": 20}


def test_a_new_start_goes_on_after_the_newest(memory: Path, root: Path) -> None:
    for value in (1, 2, 3):
        writer = RekindleWriter(root)
        dcp.save({"n": value}, storage_writer=writer)
        writer.close()
    assert steps(root) == [1, 2, 3]


def test_who_loads_an_older_one_goes_on_from_there(memory: Path, root: Path) -> None:
    writer = RekindleWriter(root)
    for step in (10, 20, 30):
        dcp.save({"n": step}, checkpoint_id=step, storage_writer=writer)
    writer.close()
    writer = RekindleWriter(root)
    load(root, {"n": 0}, checkpoint_id="step-10")
    dcp.save({"n": 111}, checkpoint_id="step-11", storage_writer=writer)
    assert load(root, {"n": 0}) == {"n": 111}, "what is newer has been left behind"
    load(root, {"n": 0}, checkpoint_id="step-10")  # to look at it: this start has begun
    dcp.save({"n": 20}, checkpoint_id="step-20", storage_writer=writer)
    writer.close()
    assert steps(root) == [10, 11, 20] and load(root, {"n": 0}) == {"n": 20}


def test_every_checkpoint_reaches_storage_unless_told_otherwise(memory: Path, root: Path, tmp_path: Path) -> None:
    writer = RekindleWriter(root)
    for step in range(1, 6):
        dcp.save({"x": torch.full((1 << 20,), float(step))}, storage_writer=writer)
    writer.close()
    assert steps(root) == [1, 2, 3, 4, 5]
    other = RekindleWriter(tmp_path / "other", keep=2)
    for step in range(1, 6):
        dcp.save({"x": torch.full((1 << 20,), float(step))}, storage_writer=other)
    other.close()
    assert steps(tmp_path / "other")[-1] == 5 and len(steps(tmp_path / "other")) <= 2


def test_settings_that_make_no_sense(memory: Path, root: Path) -> None:
    with pytest.raises(UsageError, match="keep"):
        RekindleWriter(root, keep=0)
    writer = RekindleWriter(root)
    with pytest.raises(UsageError, match="other settings"):
        RekindleWriter(root, keep=3)
    with pytest.raises(UsageError, match="use_collectives"):
        dcp.save({"n": 1}, storage_writer=writer, use_collectives=False)
    with pytest.raises(CheckpointException, match="whole number"):
        dcp.save({"n": 1}, checkpoint_id=-1, storage_writer=writer)


# -- async_save -----------------------------------------------------------------------------------------------------


def test_training_goes_on_while_a_copy_is_saved(memory: Path, root: Path) -> None:
    state, writer = awkward(), RekindleWriter(root)
    expected = copy.deepcopy(state)
    future = dcp.async_save(state, storage_writer=writer)
    with torch.no_grad():
        state["turned"].zero_(), state["model"]["weight"].zero_(), state["parameter"].zero_()
    state["nested"]["plain"].append(4)
    future.result()
    assert same(load(root, expected), expected)


def test_a_stager_by_itself_serves_other_writers_too(tmp_path: Path) -> None:
    state, stager = awkward(), RekindleStager()
    expected = copy.deepcopy(state)
    future = dcp.async_save(state, checkpoint_id=tmp_path / "1", async_stager=stager)
    state["turned"].zero_()
    future.result()
    loaded = blank(expected)
    dcp.load(loaded, checkpoint_id=tmp_path / "1")
    assert same(loaded, expected)
    stager.close()


def test_staged_memory_is_used_again_and_never_too_early() -> None:
    stager = RekindleStager()
    state = {"a": torch.arange(1000.0), "n": [1]}
    first = stager.stage(state)
    state["a"] += 1
    second = stager.stage(state)  # nobody has let go of the first
    assert torch.equal(first["a"], torch.arange(1000.0)) and torch.equal(second["a"], state["a"])
    address = first["a"].data_ptr()
    del first
    third = stager.stage(state)
    assert third["a"].data_ptr() == address != second["a"].data_ptr()
    assert torch.equal(second["a"], state["a"]) and third["n"] == [1] and third["n"] is not state["n"]
    stager.close()
    assert torch.equal(third["a"], state["a"])


def test_the_memory_of_a_finished_save_is_free_for_the_next(memory: Path, root: Path) -> None:
    writer = RekindleWriter(root)
    for _ in range(3):
        dcp.async_save({"a": torch.randn(1000)}, storage_writer=writer).result()
    assert len(writer._stager._buffers) == 1


def test_an_error_reaches_the_future(memory: Path, root: Path) -> None:
    writer = RekindleWriter(root)
    dcp.save({"n": 5}, checkpoint_id=5, storage_writer=writer)
    future = dcp.async_save({"n": 4}, checkpoint_id=4, storage_writer=writer)
    assert isinstance(future.exception(), CheckpointException)
    assert load(root, {"n": 0}) == {"n": 5}


def test_another_process_is_refused() -> None:
    assert AsyncCheckpointerType.PROCESS  # what pickles the writer
    with pytest.raises(UsageError, match="THREAD"):
        copy.copy(RekindleWriter.__new__(RekindleWriter))


def test_a_target_of_another_shape_is_refused(memory: Path, root: Path) -> None:
    class Wrong(DefaultLoadPlanner):
        def transform_tensor(self, read_item: Any, tensor: torch.Tensor) -> torch.Tensor:
            return tensor[:1]

    dcp.save({"a": torch.zeros(3)}, storage_writer=RekindleWriter(root))
    with pytest.raises(CheckpointException) as caught:
        load(root, {"a": torch.zeros(3)}, planner=Wrong())
    assert isinstance(failure(caught), StateMismatchError)
