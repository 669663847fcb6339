"""Is torchrun's rendezvous for a job of this node alone: gives each start of the ranks a store of its own."""

from __future__ import annotations

import os
import time
from typing import Any

from rekindle.faults.torchelastic import FRESH_STORE

__all__ = ["Alone"]

_HOST = "127.0.0.1"


class Alone:
    """torch's ``RendezvousHandler``, by its methods: the class itself can't be imported before torch is.

    Nobody else can come, so it waits for nobody, listens for nobody, and asks for no name or port.
    """

    def __init__(self, params: Any) -> None:
        """``params`` are torch's."""
        self.pause = 0.0
        """Seconds until the next round. It counts once."""
        self._backend: str = params.backend
        self._run_id: str = params.run_id
        self._rounds = 0
        self._store: Any = None
        """The store of the newest round."""
        os.environ[FRESH_STORE] = "1"  # for the ranks

    @property
    def is_first_round(self) -> bool:
        """True while the newest round is the first one."""
        return self._rounds == 1

    @property
    def use_agent_store(self) -> bool:
        """True: the ranks use the round's store. One that a rank opened would need a port that is still free then."""
        return True

    def get_backend(self) -> str:
        """Returns the name of this kind of rendezvous."""
        return self._backend

    def get_run_id(self) -> str:
        """Returns the job's name."""
        return self._run_id

    def next_rendezvous(self) -> Any:
        """Returns the next round, with a new store: what dead ranks have left in the one before is gone with it."""
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415
        from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo  # noqa: PLC0415

        time.sleep(self.pause)
        self.pause = 0.0
        self._store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        self._rounds += 1
        info = RendezvousStoreInfo(_HOST, self._store.port)
        return RendezvousInfo(PrefixStore("rekindle/launchers", self._store), 0, 1, info)

    def num_nodes_waiting(self) -> int:
        """Returns 0: there are no other nodes."""
        return 0

    def await_ends(self, within: float) -> bool:
        """Returns True: there are no ranks on other nodes."""
        return True

    def is_closed(self) -> bool:
        """Returns False: there is nobody who could close it."""
        return False

    def set_closed(self) -> None:
        """Does nothing: there is nobody to hear of it."""

    def shutdown(self) -> bool:
        """Gives the store up, as the ranks have ended."""
        self._store = None
        return True
