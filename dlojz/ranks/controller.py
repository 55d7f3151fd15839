"""The process through which the notebook's messages reach the ranks: ipyparallel's controller.

Layer 5. Invariant: it takes messages signed with a key that lies in a folder of its owner alone, listens on the
loopback interface unless told otherwise, and ends with the process that started it, as do the helpers it forks.

Run as `python -m dlojz.ranks.controller FOLDER [HOST]`.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

from dlojz.train.lifeline import die_with_parent

# A new rank is announced at its first heartbeat: at the default of 3 s, waiting for it would take most of the start.
_HEARTBEAT_MS = 250
# A rank is declared lost by its keeper, which is its parent; a missed heartbeat only means that the machine is busy.
_MISSES = 10_000


def profile(folder: Path) -> Path:
    """Where the controller keeps what concerns this set of ranks, in place of the user's own profile."""
    return folder / "profile"


def connection_file(folder: Path, side: str) -> Path:
    """How to reach the controller; `side` is `client` (the notebook) or `engine` (a rank)."""
    return profile(folder) / "security" / f"ipcontroller-{side}.json"


def main(folder: Path, host: str = "127.0.0.1") -> None:
    """Serve until the parent ends.

    Args:
        folder: of this set of ranks.
        host: name or address on which the ranks reach this machine.
    """
    die_with_parent()
    os.register_at_fork(after_in_child=die_with_parent)
    from ipyparallel.controller.app import IPController
    from traitlets.config import Config

    class Controller(IPController):
        """The controller, deaf to configuration files of the user."""

        def load_config_file(self, *_: Any, **__: Any) -> None:
            """Read nothing."""

    config = Config()
    config.ProfileDir.location = str(profile(folder))
    config.IPController.use_threads = True
    config.IPController.db_class = "NoDB"  # an answer goes to who asked; to keep it here would fill the memory
    config.IPController.ip = socket.gethostbyname(host)
    config.IPController.broadcast_scheduler_depth = 0
    config.TaskScheduler.scheme_name = "none"
    config.HeartMonitor.period = _HEARTBEAT_MS
    config.HeartMonitor.max_heartmonitor_misses = _MISSES
    config.IPController.log_level = "CRITICAL"
    application = Controller(config=config)
    application.initialize([])
    application.start()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
