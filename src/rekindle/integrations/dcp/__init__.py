"""torch.distributed.checkpoint (DCP) over Rekindle's stores: saves at the speed of memory, loads that are verified.

::

    dcp.save(state_dict, storage_writer=RekindleWriter("runs/17"))
    dcp.load(state_dict, storage_reader=RekindleReader("runs/17"))
"""

from __future__ import annotations

from rekindle.integrations.dcp.reader import RekindleReader
from rekindle.integrations.dcp.stager import RekindleStager
from rekindle.integrations.dcp.writer import RekindleWriter

__all__ = ["RekindleReader", "RekindleStager", "RekindleWriter"]
