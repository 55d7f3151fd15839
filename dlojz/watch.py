"""`python -m dlojz.watch train.py …`: measure a script in processes that a launcher of one's own has started.

    torchrun --nproc-per-node 2 -m dlojz.watch train.py --lr 1e-3
    srun python -m dlojz.watch train.py --lr 1e-3

Each process runs the script and measures it, as under `dlojz run train.py`; the output stays the launcher's. Rank 0
claims the run folder. The others are given its name through torchrun's store, or through a file named after the job
step. The run has ended when rank 0's parent has; its record is then made of the events.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import warnings
from pathlib import Path

import psutil

from dlojz.base.errors import LabError
from dlojz.base.language import refusal, say
from dlojz.config.run_config import RunConfig
from dlojz.results.record import write_atomic
from dlojz.running import worker
from dlojz.running.folder import read_owner
from dlojz.running.slurm.slurm_rank import address_of, free_port, ports_of
from dlojz.running.store import claim, runs_root

FOUND_S = 120.0
"""Seconds in which rank 0 must have claimed the run folder."""
_KEY = "dlojz/folder"


_GIVEN_ADDRESS = "MASTER_ADDR" in os.environ
"""Whether whoever called srun has said where the ranks meet; idr_torch sets the variable itself."""


def _meet_at(address: str, port: int) -> None:
    """Set where the ranks meet, unless it was given."""
    if not _GIVEN_ADDRESS:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)


def _folder_of(rank: int, world_size: int, config: RunConfig) -> Path:
    """Claim the run folder on rank 0, and learn its name on the others.

    Raises:
        LabError: if the folder cannot be claimed, or nothing tells the other ranks its name.
    """
    root = runs_root()
    if rank == 0:
        folder, _ = claim(config, root, again=True)
        owner = read_owner(folder)
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            if owner is not None:
                owner.handed_to(os.getppid()).write(folder)
        if world_size == 1:
            return folder
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if rank == 0:
            store.set(f"{_KEY}/{attempt}", str(folder))
        return Path(store.get(f"{_KEY}/{attempt}").decode())
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID")
    if not all(os.environ.get(name) for name in names):
        raise refusal(
            en="these processes have no launcher that dlojz.watch knows: start them with torchrun or srun, or use "
            "`dlojz run train.py --nproc N`.",
            fr="ces processus n’ont pas de lanceur que dlojz.watch connaisse : lancez-les par torchrun ou srun, ou "
            "prenez `dlojz run train.py --nproc N`.",
        )
    step = "-".join(os.environ.get(name, "0") for name in (*names, "SLURM_RESTART_COUNT"))
    note = root / f".step-{step}"
    if rank == 0:
        # The node's name need not resolve, and the port that idr_torch takes may be in use.
        place = (address_of(os.environ.get("SLURMD_NODENAME", "")), free_port(ports_of(int(os.environ[names[0]]))))
        write_atomic(note, json.dumps([str(folder), *place]))
        _meet_at(*place)
        return folder
    until_s = time.monotonic() + FOUND_S
    while time.monotonic() < until_s:
        with contextlib.suppress(OSError):
            found, address, port = json.loads(note.read_text(encoding="utf-8"))
            _meet_at(address, port)
            return Path(found)
        time.sleep(0.1)
    raise refusal(
        en=f"rank 0 has named no run folder in {root} within {FOUND_S:g} s: does every node see this folder?",
        fr=f"le rang 0 n’a nommé aucun dossier d’exécution dans {root} en {FOUND_S:g} s : chaque nœud voit-il ce "
        "dossier ?",
    )


def main(words: list[str]) -> int:
    """Run the script that the words name on this rank; returns the exit code.

    Raises:
        SystemExit: with the script's exit code.
    """
    if not words or words[0].startswith("-"):
        print(
            say(
                en="usage: torchrun --nproc-per-node N -m dlojz.watch SCRIPT.py [ARGUMENTS]",
                fr="usage : torchrun --nproc-per-node N -m dlojz.watch SCRIPT.py [ARGUMENTS]",
            ),
            file=sys.stderr,
        )
        return 2
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "20000")  # before torch is imported
    warnings.filterwarnings("ignore", module="idr_torch")
    import idr_torch

    rank, world_size = int(idr_torch.rank), int(idr_torch.size)
    try:
        folder = _folder_of(rank, world_size, RunConfig.of_script(words[0], words[1:], processes=world_size))
    except LabError as error:
        print(f"dlojz: {error}", file=sys.stderr)
        return 2
    if rank == 0:
        print(say(en=f"dlojz: measured in {folder}", fr=f"dlojz : mesuré dans {folder}"), file=sys.stderr, flush=True)
    return worker.main(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
