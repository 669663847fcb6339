"""Holds the original's enumerations, by their names and numbers."""

from __future__ import annotations

from enum import Enum

__all__ = ["Action", "OptimizerType", "RepairType", "ReportState"]


class Action(Enum):
    """Answer of ``tft_wait_next_action``."""

    RETRY = 0
    EXIT = 1


class OptimizerType(Enum):
    """Part of a model that a group of replicas holds: the dense one, or that of experts."""

    ATTENTION = 0
    MOE = 1


class ReportState(Enum):
    """State that a rank reports of itself."""

    RS_NORMAL = 0
    RS_RETRY = 1
    RS_UCE = 2
    RS_UCE_CORRUPTED = 3
    RS_HCCL_FAILED = 4
    RS_INIT_FINISH = 5
    RS_PREREPAIR_FINISH = 6
    RS_STEP_FINISH = 7
    RS_UNKNOWN = 8


class RepairType(Enum):
    """Kind of a repair, of which none is done here."""

    RT_SEND = 0
    RT_UCE_HIGHLEVEL = 1
    RT_UCE_LOWLEVEL = 2
    RT_RECV_REPAIR = 3
    RT_ROLLBACK = 4
    RT_LOAD_CKPT = 5
    RT_LOAD_REBUILD = 6
