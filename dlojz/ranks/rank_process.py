"""Process of one rank: the supervisor forks it, with torch already in memory, and it ends with the supervisor."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch._dynamo  # the first optimizer of a process imports it, which takes seconds
import torch.distributed  # noqa: F401 - imported once, in the supervisor, for all ranks
from ipykernel.kernelbase import Kernel
from ipyparallel.engine.app import IPEngine
from traitlets.config import Config

from dlojz.base.machine import die_with_parent
from dlojz.ranks import rank_setup
from dlojz.ranks.rank_setup import Streams, connection_file, profile

_REGISTRATION_S = 60


class RankEngine(IPEngine):
    """ipyparallel's engine, without configuration files of the user; its streams are those of `Streams`."""

    def load_config_file(self, *_: Any, **__: Any) -> None:
        """Read nothing."""

    def redirect_output(self, *_: Any) -> None:
        """Leave the streams alone: what a cell prints comes back with its answer."""


def be_a_rank(folder: Path, name: str) -> NoReturn:
    """Serve the notebook until the supervisor ends; never return into the supervisor's code.

    Args:
        folder: of this set of ranks.
        name: by which the notebook addresses this process; no other ever had it.
    """
    code = 1
    try:
        die_with_parent()
        os.setsid()  # what a cell starts can be ended together with it
        # The supervisor has no threads, and a child of a cell that forks has none of this process's: both may fork.
        os.register_at_fork(after_in_child=die_with_parent)
        _be_first_to_go()
        _let_cells_alone_be_interrupted()
        rank_setup.streams = Streams(log=folder / "log")
        config = Config()
        config.ProfileDir.location = str(profile(folder))
        config.IPEngine.url_file = str(connection_file(folder, "engine"))
        config.IPEngine.enable_nanny = False  # the supervisor is one
        config.IPEngine.max_heartbeat_misses = 0  # a rank ends with its supervisor, not when the machine is busy
        config.IPEngine.timeout = _REGISTRATION_S
        config.IPEngine.log_level = "ERROR"
        application = RankEngine.instance(config=config)
        application.initialize([])
        application.ident = name
        application.start()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        print(f"{name}: {type(error).__name__}: {error}", file=sys.__stderr__)
    finally:
        os._exit(code)


def _let_cells_alone_be_interrupted() -> None:
    """Keep ipykernel from listening to SIGINT around every message: `rank_setup.run` does, around the cell alone.

    An interrupt between a message and the cell it brings would otherwise make the answer a failure.
    """
    for hook in ("pre_handler_hook", "post_handler_hook"):
        setattr(Kernel, hook, lambda _: None)


def _be_first_to_go() -> None:
    """Let the system end a rank, not the notebook, where memory runs out."""
    try:
        Path("/proc/self/oom_score_adj").write_text("1000")
    except OSError:
        return
