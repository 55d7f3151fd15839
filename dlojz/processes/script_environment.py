"""Environment of a script's processes: who each of them is, and the variables that it sees.

A script sees what `python train.py` or `torchrun train.py` shows it. What the watch has to know (the run folder, the
rank) stands in one variable of its own, which is taken out before the script runs, together with all that was set for
the start. Processes that the script starts, or its launcher, are given the variable again, and a hook (`start_hook/`).

Source: torch 2.13, `distributed/elastic/agent/server/local_elastic_agent.py`, `_start_workers`, and
`distributed/run.py`, `config_from_args` (OMP_NUM_THREADS).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from dlojz.base.files import CHECKOUT
from dlojz.base.machine import meet_on_loopback

VARIABLE = "DLOJZ_WATCHED"
HOOK = Path(__file__).with_name("start_hook")
OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables by which a script learns that it is one of several processes."""
_PACKAGE = [] if CHECKOUT.name in ("site-packages", "dist-packages") else [str(CHECKOUT)]
"""Where the package is found, unless it is installed beside all others."""
_STARTED_WITH = {"PYTHONUNBUFFERED": "1"}
"""Set while a script's processes start, so that what they print is seen at once."""


@dataclass(frozen=True)
class ProcessIdentity:
    """Identity of a watched process.

    Args:
        rank: among the processes that were launched; None where a launcher, or the script itself, started it.
        world_size: how many were launched.
        origin_s: moment of `time.perf_counter` from which the timeline counts, the same for all processes of a machine;
            None where the processes compare their clocks.
        command: the launcher's name; empty without one.
        restored: variables that were set for the start, with their value before; None where they were not set.
    """

    folder: str
    rank: int | None = None
    world_size: int = 1
    origin_s: float | None = None
    command: str = ""
    restored: Mapping[str, str | None] = field(default_factory=dict)
    python: tuple[int, ...] = tuple(sys.version_info[:2])

    @classmethod
    def taken_from(cls, environment: MutableMapping[str, str]) -> Self | None:
        """Read the identity and take it, and all that was set for the start, out of an environment; None without."""
        text = environment.pop(VARIABLE, "")
        if not text:
            return None
        identity = cls(**json.loads(text))
        for name, value in identity.restored.items():
            if value is not None:
                environment[name] = value
            else:
                environment.pop(name, None)
        _without_hook(environment)
        return identity

    def put_into(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return an environment in which a process of dlojz takes this identity."""
        names = (*_STARTED_WITH, "PYTHONPATH")
        content = {**asdict(self), "restored": {name: environment.get(name) for name in names}}
        paths = _joined(_PACKAGE, environment)
        return {**environment, **_STARTED_WITH, "PYTHONPATH": paths, VARIABLE: json.dumps(content)}

    def put_with_hook(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return an environment in which every Python process that runs a script is watched."""
        content = {**asdict(self), "restored": {name: environment.get(name) for name in _STARTED_WITH}}
        paths = _joined([str(HOOK), *_PACKAGE], environment)
        return {**environment, **_STARTED_WITH, "PYTHONPATH": paths, VARIABLE: json.dumps(content)}


def _joined(paths: Sequence[str], environment: Mapping[str, str]) -> str:
    """Put folders before those of `PYTHONPATH`."""
    return os.pathsep.join([*paths, *filter(None, [environment.get("PYTHONPATH")])])


def _without_hook(environment: MutableMapping[str, str]) -> None:
    """Take the hook and the package out of `PYTHONPATH`, to which a launcher may have added folders of its own."""
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    if str(HOOK) in paths:
        index = paths.index(str(HOOK))
        # They stand together, as `_joined` put them there.
        del paths[index : index + 1 + len(_PACKAGE)]
        if paths:
            environment["PYTHONPATH"] = os.pathsep.join(paths)
        else:
            environment.pop("PYTHONPATH", None)


def restore_path() -> None:
    """Leave `sys.path` as the script would find it; the package comes last, where the script names nothing alike."""
    user_paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    for path in (str(HOOK), *_PACKAGE):
        # What the user's own PYTHONPATH names stays.
        if path not in user_paths and path in sys.path:
            sys.path.remove(path)
    sys.path += [path for path in _PACKAGE if path not in sys.path]


def as_torchrun(rank: int, processes: int, port: int, run_id: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torchrun gives to each process, on one node.

    Args:
        port: on which rank 0 listens.
        run_id: by which idr_torch and others know that these variables are the processes'.
        environment: of the user, whose number of threads stays.
    """
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": run_id,
        # Not torchrun's: of a run that hangs, it tells who came to which collective.
        "TORCH_FR_BUFFER_SIZE": environment.get("TORCH_FR_BUFFER_SIZE", "20000"),
    }
    if processes > 1 and "OMP_NUM_THREADS" not in environment:
        variables["OMP_NUM_THREADS"] = "1"
    # All processes are here: whatever interface is named, they meet on the loopback.
    interfaces = {name: value for name, value in environment.items() if name.endswith("_SOCKET_IFNAME")}
    meet_on_loopback(interfaces)
    return variables | interfaces


_PORTS = range(20_000, 32_768)
"""Below those that Linux gives to whoever asks for any: a connection made meanwhile takes none of these."""


def free_port() -> int:
    """Find a TCP port of this machine that nobody uses at this moment, and nobody is given by chance."""
    # Twenty of them, then 0: whichever the system gives.
    for port in (*random.SystemRandom().sample(_PORTS, 20), 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise OSError("no free port")
