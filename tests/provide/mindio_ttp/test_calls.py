"""The calls of one process: names, arguments, answers, and what happens at its own fault."""

from __future__ import annotations

import inspect
import logging
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import rekindle.provide
from rekindle.errors import UsageError
from rekindle.provide.mindio_ttp import controller_ttp, mindx, utils
from rekindle.provide.mindio_ttp import framework_ttp as ttp
from rekindle.provide.mindio_ttp.board import Board
from rekindle.provide.mindio_ttp.framework_ttp import ttp_decorator
from rekindle.provide.mindio_ttp.processor import action_limit

ALONE = [{"rank_list": [0], "replica_cnt": 1, "replica_shift": 0}]


def start() -> None:
    ttp.tft_init_processor(0, 1, False, False)
    ttp.tft_start_processor("127.0.0.1", 8000)
    ttp.tft_set_optimizer_replica(0, ALONE)


def test_a_program_imports_one_module_by_either_name(provided: None) -> None:
    import mindio_ttp.controller_ttp
    import mindio_ttp.framework_ttp
    import mindio_ttp.framework_ttp.ttp_decorator
    import mindio_ttp.utils

    assert mindio_ttp.framework_ttp is ttp
    assert mindio_ttp.framework_ttp.ttp_decorator is ttp_decorator
    assert (mindio_ttp.controller_ttp, mindio_ttp.utils) == (controller_ttp, utils)


NO_ARGUMENTS = (
    "get_device get_mindio_export_version tft_destroy_controller tft_destroy_processor tft_get_reboot_type "
    "tft_get_repair_step tft_get_repair_type tft_is_reboot_node tft_reset_limit_step tft_start_copy_os "
    "tft_wait_next_action tft_wait_repair_action"
)
DUMPS = ("save_ckpt", "rename", "exit", "stop", "clean")
KEPT = (
    *("rebuild_group", "repair", "rollback", "stream_sync", "zit_downgrade_rebuild"),
    *("zit_upgrade_rebuild", "zit_upgrade_repair", "zit_upgrade_rollback"),
)
"""Callbacks of repairs, which are never called."""
INIT = "rank, world_size, enable_local_copy, "
CONTROLLER = {
    "tft_destroy_controller": "",
    "tft_init_controller": INIT + "enable_arf=False, enable_zit=False",
    "tft_start_controller": "bind_ip, port, enable_tls=True, tls_info=''",
}
SIGNATURES = {
    ttp: {
        **dict.fromkeys(NO_ARGUMENTS.split(), ""),
        **{f"tft_register_{name}_handler": "func, ctx=None" for name in (*DUMPS, *KEPT)},
        **CONTROLLER,
        "set_mindio_export_version": "framework_type",
        "tft_can_do_uce_repair": "hbm_error_time, start_time=None, end_time=None",
        "tft_end_updating_os": "step",
        "tft_exception_handler": "func",
        "tft_init_processor": INIT
        + "enable_tls=True, tls_info='', enable_uce=True, enable_arf=False, enable_zit=False",
        "tft_pause_train": "cur_step",
        "tft_register_decrypt_handler": "decryptor",
        "tft_register_exception_handler": "fault_pattern, fault_type, fault_handle",
        "tft_report_error": "error_type, error_code=''",
        "tft_report_load_ckpt_step": "step",
        "tft_set_dp_group_info": "rank, dp_rank_list",
        "tft_set_optimizer_replica": "rank, replica_info",
        "tft_set_step_args": "args",
        "tft_start_processor": "master_ip, port, local_ip=''",
        "tft_start_updating_os": "backup_step=-1",
    },
    controller_ttp: {
        **CONTROLLER,
        "tft_notify_controller_change_strategy": "strategy, params=''",
        "tft_notify_controller_dump": "",
        "tft_notify_controller_on_global_rank": "fault_ranks, time=1",
        "tft_notify_controller_prepare_action": "action, fault_ranks=None",
        "tft_notify_controller_stop_train": "fault_ranks, stop_type='stop', timeout=None",
        "tft_query_high_availability_switch": "",
        "tft_register_mindx_callback": "action, func",
    },
    utils: {
        "tft_can_do_uce_repair": "hbm_error_time, start_time=None, end_time=None",
        "tft_set_update_end_time": "end_time=None",
        "tft_set_update_start_time": "start_time=None",
    },
}
"""The original's public calls, of each module, and their arguments."""
ENUMS = {
    "Action": "RETRY EXIT",
    "OptimizerType": "ATTENTION MOE",
    "RepairType": "RT_SEND RT_UCE_HIGHLEVEL RT_UCE_LOWLEVEL RT_RECV_REPAIR RT_ROLLBACK RT_LOAD_CKPT RT_LOAD_REBUILD",
    "ReportState": "RS_NORMAL RS_RETRY RS_UCE RS_UCE_CORRUPTED RS_HCCL_FAILED RS_INIT_FINISH RS_PREREPAIR_FINISH "
    "RS_STEP_FINISH RS_UNKNOWN",
}
"""The original's enumerations. Their values count from 0."""


def test_names_and_arguments_are_the_originals() -> None:
    for module, wanted in SIGNATURES.items():
        assert set(module.__all__) - {"ttp_logger", *ENUMS} == wanted.keys(), module.__name__
        for name, arguments in wanted.items():
            parameters = inspect.signature(getattr(module, name)).parameters.values()
            assert ", ".join(str(one.replace(annotation=one.empty)) for one in parameters) == arguments, name
    for name, members in ENUMS.items():
        assert {one.name: one.value for one in getattr(ttp, name)} == {
            member: value for value, member in enumerate(members.split())
        }
    assert callable(controller_ttp.ttp_logger.LOGGER.info)
    missing = [name for name in ttp_decorator.__all__ if getattr(ttp, name) is not getattr(ttp_decorator, name)]
    assert not missing, "programs import these from either place"


def test_a_fault_is_answered_by_a_dump_in_order(
    memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The callbacks get what the original gives them; the exception goes on. Those of repairs are said once to rest."""
    told: list[Any] = []
    trainer = threading.get_ident()
    monkeypatch.setenv("TTP_STOP_CLEAN_BEFORE_DUMP", "1")
    ttp.tft_init_controller(0, 1, False)
    ttp.tft_start_controller("127.0.0.1", 8000, False)
    start()

    def save(*words: Any) -> None:
        told.append(("save", threading.get_ident() != trainer, *words))

    ttp.tft_register_save_ckpt_handler(save, "context")
    ttp.tft_register_rename_handler(lambda *words: told.append(("rename", *words)), "not for rename")
    ttp.tft_register_exit_handler(lambda *words: told.append(("exit", *words)), "bye")
    ttp.tft_register_stop_handler(lambda *words: told.append(("stop", *words)), "halt")
    ttp.tft_register_clean_handler(lambda *words: told.append(("clean", *words)), "sweep")
    for name in KEPT:
        getattr(ttp, f"tft_register_{name}_handler")(lambda *words: told.append("never"))
    assert caplog.text.count("are kept, and never called: a fault is answered by a dump") == 1

    @ttp.tft_exception_handler
    def train(model: str) -> None:
        for step in (1, 2, 3):
            ttp.tft_start_updating_os(-1)
            ttp.tft_end_updating_os(step)
        raise ValueError("no RuntimeError")

    with pytest.raises(ValueError, match="no RuntimeError"):
        train("a model")
    info = [{"type": ttp.OptimizerType.ATTENTION.value, "ranks": [0]}]
    assert told == [
        ("stop", ["a model"], "halt"),
        ("clean", False, ["a model"], "sweep"),
        ("save", True, 3, info, ["a model"], "context"),
        ("rename", 3, ["a model"]),
        ("exit", "bye"),
    ]
    assert (ttp.tft_get_repair_step(), ttp.tft_get_repair_type()) == (3, "dump")
    assert ttp.tft_wait_next_action() == ttp.Action.EXIT.value


def test_generators_are_those_of_the_steps_end() -> None:
    start()
    found: list[Any] = []
    ttp.tft_register_save_ckpt_handler(lambda *any: found.append((torch.rand(3).tolist(), random.random())))

    def train() -> None:
        ttp.tft_start_updating_os()
        ttp.tft_end_updating_os(5)
        found.append((torch.rand(3).tolist(), random.random()))  # as a forward does
        raise RuntimeError

    with pytest.raises(RuntimeError):
        ttp.tft_exception_handler(train)()
    assert len(found) == 2 and found[0] == found[1]


def test_a_dump_that_fails_gives_no_name(caplog: pytest.LogCaptureFixture) -> None:
    start()
    named: list[int] = []

    def save(*any: Any) -> None:
        raise OSError("no space left")

    ttp.tft_register_save_ckpt_handler(save)
    ttp.tft_register_rename_handler(lambda step, args: named.append(step))

    def train() -> None:
        ttp.tft_start_updating_os()
        ttp.tft_end_updating_os(1)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        ttp.tft_exception_handler(train)()
    assert not named and ttp.tft_get_repair_step() == 0
    assert "no checkpoint was dumped" in caplog.text and "no space left" in caplog.text


_TOLD_LATE = """
import sys, threading, time
from pathlib import Path
from rekindle.memory.fault import Fault
from rekindle.provide.mindio_ttp import framework_ttp as ttp, processor

def train():
    ttp.tft_start_updating_os()
    ttp.tft_end_updating_os(2)
    guard = processor.current()._guard
    long_ago = time.monotonic() - 1000.0
    fault = Fault("signal", 7, guard._generation, 2, "rank 7 was killed by SIGKILL", noticed=long_ago)
    guard._hear({"fault": fault.to_json()})
    threading.Event().wait()

ttp.tft_init_processor(0, 1, False, False)
ttp.tft_start_processor("127.0.0.1", 8000)
ttp.tft_set_optimizer_replica(0, [{"rank_list": [0], "replica_cnt": 1, "replica_shift": 0}])
ttp.tft_register_save_ckpt_handler(lambda step, *any: Path(sys.argv[1]).write_text(str(step)))
ttp.tft_register_rename_handler(lambda step, *any: Path(sys.argv[1]).rename(sys.argv[1] + "-named"))
ttp.tft_exception_handler(train)()
"""


def test_a_rank_that_is_told_late_of_a_fault_elsewhere_has_all_its_time_to_dump(tmp_path: Path) -> None:
    place = tmp_path / "dump"
    command = [sys.executable, "-c", _TOLD_LATE, str(place)]
    ended = subprocess.run(command, timeout=300, capture_output=True, text=True, check=False)
    assert ended.returncode == 75 and (tmp_path / "dump-named").read_text() == "2", ended.stderr


def test_before_the_first_step_there_is_nothing_to_dump() -> None:
    start()
    ttp.tft_register_save_ckpt_handler(lambda *any: pytest.fail("called"))
    with pytest.raises(RuntimeError):
        ttp.tft_exception_handler(lambda: (_ for _ in ()).throw(RuntimeError()))()
    assert ttp.tft_get_repair_step() == 0


def test_a_function_that_ends_well_leaves_the_job() -> None:
    start()

    @ttp.tft_exception_handler
    def train(first: int) -> int:
        ttp.tft_start_updating_os()
        ttp.tft_end_updating_os(first)
        return first

    assert train(11) == 11
    assert ttp.tft_get_repair_type() == "unknow"
    with pytest.raises(UsageError, match="tft_init_processor"):
        ttp.tft_start_updating_os()


def test_a_callback_that_ends_its_thread_keeps_no_other_from_being_called(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []
    for action in mindx.ACTIONS:
        controller_ttp.tft_register_mindx_callback(action, lambda *words, action=action: told.append(action))
    controller_ttp.tft_register_mindx_callback("report_fault_ranks", lambda *words: sys.exit(3))
    mindx.report_fault({1: 1})
    assert told == ["report_stop_complete", "report_strategies"]
    assert "the callback of report_fault_ranks failed" in caplog.text and "has not returned" not in caplog.text


def test_an_orchestrator_of_an_older_version_is_told() -> None:
    """Its report_fault_ranks takes one argument, where the original gives two."""
    told: list[Any] = []
    assert controller_ttp.tft_register_mindx_callback("report_fault_ranks", lambda faults: told.append(faults)) == 0
    assert controller_ttp.tft_register_mindx_callback("report_result", lambda *words: told.append(words)) == 0
    assert controller_ttp.tft_register_mindx_callback("report_weather", print) == 1
    start()
    ttp.tft_register_save_ckpt_handler(lambda *any: None)

    def train() -> None:
        ttp.tft_start_updating_os()
        ttp.tft_end_updating_os(2)
        ttp.tft_report_error(ttp.ReportState.RS_RETRY.value)

    train()
    assert told == [{0: 1}, (0, "step 2 is dumped", {0: 1}, "dump")]


@pytest.mark.parametrize("damage", ["UCE ERROR occurred", "a page is gone", ttp.ReportState.RS_UCE_CORRUPTED])
def test_damaged_memory_is_not_written(damage: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody has a copy: rather no dump than one of what the memory happens to hold."""
    start()
    ttp.tft_register_save_ckpt_handler(lambda *any: pytest.fail("called"))
    ttp.tft_register_exception_handler("a page is gone", "RS_UCE", lambda text: text)
    ttp.tft_start_updating_os()
    ttp.tft_end_updating_os(2)
    if isinstance(damage, str):
        with pytest.raises(RuntimeError, match=damage):
            ttp.tft_exception_handler(lambda: (_ for _ in ()).throw(RuntimeError(damage)))()
    else:
        ttp.tft_report_error(damage)
    assert ttp.tft_get_repair_step() == 0 and "no checkpoint was dumped" in caplog.text
    assert "no rank has a complete step that can be read" in caplog.text


def test_repairs_are_refused_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        ttp.tft_init_processor(0, 1, True, False, "", True, True, True)
        ttp.tft_start_copy_os()
    assert caplog.text.count("enable_arf, enable_zit, enable_local_copy is accepted, and nothing is repaired") == 1
    assert caplog.text.count("tft_start_copy_os: accepted, and no local copy") == 1
    assert not ttp.tft_can_do_uce_repair(1) and not ttp.tft_is_reboot_node()
    assert controller_ttp.tft_notify_controller_prepare_action("hot switch", {}) == 1
    assert controller_ttp.tft_notify_controller_stop_train({}, "pause", 3) == 1
    assert controller_ttp.tft_notify_controller_dump() == 1, "nobody trains"
    assert controller_ttp.tft_notify_controller_change_strategy("continue") == 0
    assert controller_ttp.tft_notify_controller_on_global_rank({}) == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda: ttp.tft_init_processor(1, 1, False),
        lambda: ttp.tft_init_controller(0, 100_001, False),
        lambda: ttp.tft_start_controller("0.0.0.0", 8000),
        lambda: ttp.tft_start_controller("127.0.0.1", 80),
        lambda: ttp.tft_start_processor("127.0.0.1", 8000),
        lambda: ttp.tft_end_updating_os(0),
        lambda: ttp.tft_report_error(17),
        lambda: ttp.set_mindio_export_version("another"),
    ],
)
def test_mistakes_raise_and_end_no_process(call: Any) -> None:
    with pytest.raises(UsageError):
        call()


def test_another_number_of_ranks_is_refused() -> None:
    ttp.tft_init_processor(0, 2, False)
    with pytest.raises(UsageError, match="initialise torch"):
        ttp.tft_start_processor("127.0.0.1", 8000)


def test_the_limit_of_an_action(monkeypatch: pytest.MonkeyPatch) -> None:
    from rekindle.launch.provide import seconds_to_end

    assert (action_limit(), seconds_to_end()) == (25.0, 30)
    monkeypatch.setenv("TTP_NORMAL_ACTION_TIME_LIMIT", "600")
    assert action_limit() == 600.0 < seconds_to_end(), "the launcher waits for as long as a dump may take"
    monkeypatch.setenv("TTP_NORMAL_ACTION_TIME_LIMIT", "5")
    with pytest.raises(UsageError):
        action_limit()


def test_one_rank_decides(tmp_path: Path) -> None:
    Board.make(tmp_path / "dumps", "old")
    Board.make(tmp_path / "dumps", "new")
    assert [path.name for path in (tmp_path / "dumps").iterdir()] == ["new"]
    first, second = (Board(tmp_path / "dumps" / "new", rank) for rank in range(2))
    assert first.claim("plan-1", {"step": 1}) and not second.claim("plan-1", {"step": 2})
    assert second.read("plan-1") == {"step": 1} and second.read("plan-2") is None
    assert first.alive(1) and not first.alive(2)
    second._place.release()
    assert not first.alive(1)
    assert not [path for path in first.folder.iterdir() if "-by-" in path.name]


def test_a_warning_is_said_on_one_rank_only(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("RANK", "1")
    with caplog.at_level(logging.WARNING):
        ttp.tft_start_copy_os()
    assert not caplog.text


def test_an_import_changes_nothing_else() -> None:
    """Neither torch nor torchelastic is loaded, let alone patched."""
    code = "import sys, mindio_ttp.framework_ttp, mindio_ttp.controller_ttp; assert 'torch' not in sys.modules"
    folder = Path(rekindle.provide.__file__).parent / "path" / "mindio_ttp"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(folder)}, check=True)


def test_a_state_that_is_none_leaves_the_next_one_its_way() -> None:
    start()
    ttp.tft_register_save_ckpt_handler(lambda *any: None)
    ttp.tft_start_updating_os()
    ttp.tft_end_updating_os(3)
    for wrong in (17, "RS_UCE", None):
        with pytest.raises(UsageError):
            ttp.tft_report_error(wrong)  # type: ignore[arg-type]
    ttp.tft_report_error(ttp.ReportState.RS_NORMAL.value)
    assert ttp.tft_get_repair_type() == "unknow"
    ttp.tft_report_error(ttp.ReportState.RS_UNKNOWN)
    assert ttp.tft_get_repair_step() == 3


def test_an_error_before_training_is_a_fault_too(caplog: pytest.LogCaptureFixture) -> None:
    start()
    ttp.tft_report_error(ttp.ReportState.RS_UNKNOWN.value)
    assert "no rank has a complete step" in caplog.text


def test_a_folder_that_can_not_be_made_is_an_error_of_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "dumps").write_text("in the way")
    ttp.tft_init_processor(0, 1, False, False)
    with pytest.raises(UsageError, match="REKINDLE_TTP_ROOT"):
        ttp.tft_start_processor("127.0.0.1", 8000)


def test_a_url_is_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_TTP_ROOT", "s3://bucket/run")
    ttp.tft_init_processor(0, 1, False, False)
    with pytest.raises(UsageError, match="must be a folder"):
        ttp.tft_start_processor("127.0.0.1", 8000)
