"""Who am I among the processes that a launcher has started, and which run folder is ours.

Layer 6. Invariant: one process makes the folder, and no other goes on before it knows of it, or of why there is none.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from dlojz.schema import LabError

_KEY, _READ = "dlojz/run_folder", "dlojz/read"
_MEETING = timedelta(minutes=5)


class Place(NamedTuple):
    """This process among all of its launcher: `srun`, `torchrun`, `deepspeed`, or none."""

    rank: int
    size: int


def place_of_this_process() -> Place:
    """Rank and number of processes, as `idr_torch` reads them from the launcher's variables."""
    there = os.environ
    by_variables = "RANK" in there and "WORLD_SIZE" in there
    if by_variables and ("TORCHELASTIC_RUN_ID" in there or "SLURM_STEP_ID" not in there):
        # What torchrun or deepspeed has started within a SLURM step has its own ranks; and idr_torch knows the two
        # by a variable that only torchrun sets.
        there.setdefault("TORCHELASTIC_RUN_ID", "deepspeed")
        there.setdefault("LOCAL_WORLD_SIZE", there["WORLD_SIZE"])
        there.pop("SLURM_STEP_ID", None)
    warnings.filterwarnings("ignore", message="Calling idr_torch")  # alone is a legal number of processes
    import idr_torch

    return Place(int(idr_torch.rank), int(idr_torch.size))


def agree(place: Place, make: Callable[[], Path]) -> Path:
    """The one run folder of all processes.

    Args:
        place: this process.
        make: makes the folder; called by the first process only.

    Raises:
        LabError: of `make`, on every process; or if the first process cannot be reached.
    """
    if place.size == 1:
        return make()
    store = _store(place)
    if place.rank > 0:
        # Who: the first process, to each other one. What: a path, or an empty text. How much: under 4 kB.
        answer = bytes(store.get(_KEY)).decode()
        store.add(_READ, 1)
        if not answer:
            raise LabError("the first process has refused the run; its own message says why.")
        return Path(answer)
    folder: Path | None = None
    try:
        folder = make()
        return folder
    finally:
        store.set(_KEY, str(folder or ""))
        deadline_s = time.monotonic() + _MEETING.total_seconds()
        while store.add(_READ, 0) < place.size - 1 and time.monotonic() < deadline_s:
            time.sleep(0.02)  # the store ends with this process's hold on it


def _store(place: Place) -> Any:
    """Where the processes meet: torchrun's own store, or one that the first process opens at the launcher's port."""
    from torch._C._distributed_c10d import TCPStore  # which torch.distributed gives out under the same name

    try:
        there = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            world_size=place.size,
            is_master=place.rank == 0 and not there,
            timeout=_MEETING,
            wait_for_workers=False,
        )
    except (RuntimeError, KeyError) as error:
        first = str(error).splitlines()[0][:200]
        raise LabError(
            f"process {place.rank} of {place.size} cannot reach the first one at "
            f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}: {first}"
        ) from None
