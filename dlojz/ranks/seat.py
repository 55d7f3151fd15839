"""The place of a process among the ranks: its number, its device, the group it shares, the variables it holds.

Layer 5, runs on the rank. Invariant: every question of the notebook is answered with plain data; nothing is raised.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

from dlojz.ranks.streams import Streams

GROUP_TIMEOUT_S = 30
"""How long a collective that torch starts from C++, where the guard does not look, may wait."""


class Seat:
    """The place of this process among the ranks.

    Args:
        rank: from 0.
        size: number of ranks.
        local_size: how many of them run on this machine.
        local_rank: this one's number among those.
    """

    def __init__(self, rank: int, size: int, local_rank: int, local_size: int) -> None:
        import torch.distributed
        from IPython.core.getipython import get_ipython

        self.rank, self.size = rank, size
        self.guard: Any = None
        self.group: Any = None
        if local_size == size:
            # The machine's own name need not resolve for processes of one machine to meet.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._former_groups: list[tuple[float, Any]] = []
        shell: Any = get_ipython()
        self.shell = shell
        shell.kernel.log.setLevel(logging.CRITICAL)  # it would report each question in the midst of what a cell prints
        self.shell.autoawait = False  # the loop that would run a coroutine is the one that waits for this cell
        self.shell.ask_exit = lambda: None  # quit() ends no rank
        self.shell._showtraceback = lambda *_: None  # what was raised is part of the answer
        warnings.filterwarnings("ignore", message="To exit: use")
        torch.set_num_threads(1)
        self.on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= local_size
        self.device = torch.device("cuda", local_rank) if self.on_gpu else torch.device("cpu")
        if self.on_gpu:
            torch.cuda.set_device(self.device)
        self.shell.user_ns.update(
            rank=rank, world_size=size, device=self.device, torch=torch, dist=torch.distributed, __name__="__main__"
        )
        self.given = frozenset(self.shell.user_ns)

    def join(self, meeting_point: str, board: str) -> None:
        """Make the process group anew; all ranks do so at the same time."""
        import torch.distributed as dist

        from dlojz.ranks.board import Board
        from dlojz.ranks.guard import Guard

        if dist.is_initialized():
            # Kept for a while: its end would wait for threads that still wait in a collective which nobody will
            # complete; once they have given up, its sockets are closed.
            now_s = time.monotonic()
            self._former_groups = [one for one in self._former_groups if now_s - one[0] < 2 * GROUP_TIMEOUT_S]
            self._former_groups.append((now_s, dist.group.WORLD))
            dist.destroy_process_group()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self.on_gpu else "gloo",
            init_method=meeting_point,
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=GROUP_TIMEOUT_S),
        )
        self.group = dist.group.WORLD
        if self.guard is not None:
            self.guard.reset()
        elif board:
            self.guard = Guard(Board(Path(board), self.rank, self.size))
            self.guard.install()
        self._meet()

    def _meet(self) -> None:
        """Wait until all are connected, unseen by the guard: a cell starts on all ranks or on none."""
        import torch.distributed as dist

        barrier = getattr(dist.barrier, "__wrapped__", dist.barrier)
        # Every rank, no data; one GPU per rank where there are GPUs.
        barrier(device_ids=[self.device.index] if self.on_gpu else None)

    @property
    def torn(self) -> bool:
        """Whether the group must be made anew before the next cell."""
        import torch.distributed as dist

        whole = dist.is_initialized() and dist.group.WORLD is self.group
        return not whole or bool(self.guard and self.guard.torn)


_seat: Seat | None = None
streams: Streams | None = None


def sit(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, Any]:
    """Become a rank: an empty answer, or `{"failure": …}`."""
    global _seat, streams
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        if streams is None:
            streams = Streams()
        _seat = Seat(rank, size, local_rank, local_size)
    except Exception as error:
        return {"failure": f"{type(error).__name__}: {error}"}
    return {}


def join(meeting_point: str, board: str) -> dict[str, Any]:
    """Make the process group anew: an empty answer, or `{"failure": …}`."""
    try:
        seated().join(meeting_point, board)
    except Exception as error:
        return {"failure": f"{type(error).__name__}: {error}"}
    return {}


def whereabouts() -> dict[str, Any]:
    """Which rank idr_torch takes this process for: `rank`, `local_rank`, `local_size`, `host`, `master`."""
    import idr_torch

    return {
        "rank": idr_torch.rank,
        "local_rank": idr_torch.local_rank,
        "local_size": idr_torch.local_world_size,
        "host": socket.gethostname(),
        "master": idr_torch.master_addr,
    }


def free_port() -> int:
    """A port of this machine on which nobody listens."""
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


def describe() -> dict[str, Any]:
    """This rank's process: `pid`, `device`, `memory_bytes` (its own, not what it shares) and number of `variables`."""
    import psutil

    seat = seated()
    return {
        "pid": os.getpid(),
        "device": str(seat.device),
        "memory_bytes": psutil.Process().memory_full_info().uss,
        "variables": len(_own_variables(seat)),
    }


def fetch(name: str) -> dict[str, Any]:
    """The value of a variable: `{"value": …}`; else `problem`, with the `names` there are or the value's `type`."""
    namespace = seated().shell.user_ns
    if name not in namespace:
        return {"problem": "unknown", "names": _own_variables(seated())}
    try:
        value = _on_the_host(namespace[name])
        if not _can_travel(value):
            raise TypeError("made in a cell")
    except Exception as error:
        return {"problem": f"{type(error).__name__}: {error}", "type": type(namespace[name]).__name__}
    return {"value": value}


def _own_variables(seat: Seat) -> list[str]:
    return [name for name in seat.shell.user_ns if name not in seat.given and not name.startswith("_")]


def seated() -> Seat:
    """This process's place.

    Raises:
        RuntimeError: if it has none yet.
    """
    if _seat is None:
        raise RuntimeError("this process is not a rank yet")
    return _seat


def _on_the_host(value: Any) -> Any:
    """The value with its tensors in main memory, without their history; what holds no tensor stays as it is."""
    import torch

    if isinstance(value, torch.Tensor):
        # A copy of what is seen of it: a view would bring its whole storage along.
        return value.detach().cpu().clone()
    if type(value) in (list, tuple):
        return type(value)(_on_the_host(item) for item in value)
    if type(value) is dict:
        return {key: _on_the_host(item) for key, item in value.items()}
    return value


def _can_travel(value: Any) -> bool:
    """Whether the notebook can make the value again from what is sent; raises where it cannot even be sent."""
    from ipyparallel.serialize import serialize_object

    made_here = f"{type(value).__module__}" == "__main__"
    serialize_object(value)
    return not made_here and not callable(value)
