"""`python -m dlojz.watch train.py …`: measure a script in processes that a launcher of one's own has started.

    torchrun --nproc-per-node 2 -m dlojz.watch train.py --lr 1e-3
    srun python -m dlojz.watch -m package.train --lr 1e-3

Each process runs the script and measures it, as under `dlojz run train.py`; the output stays the launcher's, and the
exit code is the script's. Rank 0 claims the run folder. The others are given its name through torchrun's store, or
through a file named after the job step, or after the launcher's process. The run has ended when rank 0's parent has;
its record is then made of the events. A process without a launcher drives its run itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
import warnings
from pathlib import Path

import psutil

from dlojz.base.errors import LabError
from dlojz.base.files import write_atomic
from dlojz.base.language import refusal, say
from dlojz.config.run_config import RunConfig, Script, no_script
from dlojz.processes.script_environment import ProcessIdentity
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
        folder, _ = claim(config, root, force_new=True)
        owner = read_owner(folder)
        if not _is_launched():
            return folder
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            # The run then ends with the launcher, not with this process.
            if owner is not None:
                owner.handed_to(os.getppid()).write(folder)
        if world_size == 1:
            return folder
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # one store for all of torchrun's workers
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # each elastic restart has a folder of its own
        if rank == 0:
            store.set(f"{_KEY}/{attempt}", str(folder))
        return Path(store.get(f"{_KEY}/{attempt}").decode())
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID")
    if all(os.environ.get(name) for name in names):
        # A step of a restarted job is another one.
        step = "-".join(os.environ.get(name, "0") for name in (*names, "SLURM_RESTART_COUNT"))
    elif os.environ.get("LOCAL_WORLD_SIZE", str(world_size)) == str(world_size):  # all on this machine
        # Without a job: the launcher is the parent of all, and its start tells it from a later process of that number.
        started_s = psutil.Process(os.getppid()).create_time()
        step = f"{socket.gethostname()}-{os.getppid()}-{started_s:.2f}"
    else:
        raise refusal(
            en="these processes have no launcher that dlojz.watch knows: start them with torchrun or srun, or use "
            "`dlojz run train.py --nproc N`.",
            fr="ces processus n’ont pas de lanceur que dlojz.watch connaisse : lancez-les par torchrun ou srun, ou "
            "prenez `dlojz run train.py --nproc N`.",
        )
    note = root / f".step-{step}"
    if rank == 0:
        # The node's name need not resolve, and the port that idr_torch takes may be in use.
        ports = ports_of(int(os.environ.get(names[0]) or 0))
        meeting_point = (address_of(os.environ.get("SLURMD_NODENAME", "")), free_port(ports))
        write_atomic(note, json.dumps([str(folder), *meeting_point]))
        _meet_at(*meeting_point)
        return folder
    until_s = time.monotonic() + FOUND_S
    while time.monotonic() < until_s:
        # `write_atomic` renames, so the note is complete or not there.
        with contextlib.suppress(OSError):
            folder_name, address, port = json.loads(note.read_text(encoding="utf-8"))
            _meet_at(address, port)  # from here on torch finds the master
            return Path(folder_name)
        time.sleep(0.1)
    raise refusal(
        en=f"rank 0 has named no run folder in {root} within {FOUND_S:g} s: does every node see this folder?",
        fr=f"le rang 0 n’a nommé aucun dossier d’exécution dans {root} en {FOUND_S:g} s : chaque nœud voit-il ce "
        "dossier ?",
    )


def _is_launched() -> bool:
    """Whether a launcher has started this process."""
    return "RANK" in os.environ or "SLURM_STEP_ID" in os.environ


def _place() -> tuple[int, int]:
    """Return rank and number of processes, as the launcher tells them; rank 0 of 1 without one."""
    rank, world_size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if rank.isdecimal() and world_size.isdecimal():
        return int(rank), int(world_size)
    if int(os.environ.get("SLURM_STEP_NUM_TASKS") or os.environ.get("SLURM_NTASKS") or 1) == 1:
        return 0, 1
    warnings.filterwarnings("ignore", module="idr_torch")
    import idr_torch

    return int(idr_torch.rank), int(idr_torch.size)


def _script(words: list[str]) -> tuple[str, list[str]]:
    """Split words into the name of a script, `-m MODULE` or a file, and its arguments; empty without one."""
    if words[:1] == ["-m"] and len(words) > 1:
        return f"-m {words[1]}", words[2:]
    return ("", words) if not words or words[0].startswith("-") else (words[0], words[1:])


def main(words: list[str]) -> int:
    """Run the script that the words name on this rank; returns the exit code.

    Raises:
        SystemExit: with the script's exit code.
    """
    name, arguments = _script(words)
    identity = ProcessIdentity.taken_from(os.environ)
    if not name:
        print(
            say(
                en="usage: torchrun --nproc-per-node N -m dlojz.watch [SCRIPT.py | -m MODULE] [ARGUMENTS]",
                fr="usage : torchrun --nproc-per-node N -m dlojz.watch [SCRIPT.py | -m MODULE] [ARGUMENTS]",
            ),
            file=sys.stderr,
        )
        return 2
    if identity is not None:  # a process of a run that a launcher, or its script, has started
        module = name.removeprefix("-m ") if name.startswith("-m ") else ""
        path, written = (name, "") if module else (str(Path(name).absolute()), name)
        script = Script(path=path, written=written, module=module, arguments=tuple(arguments))
        return worker.script_main(Path(identity.folder), identity, script)
    rank, world_size = _place()
    if world_size > 1:
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "20000")  # before torch is imported
    try:
        config = RunConfig.of_script(name, arguments, processes=world_size)
        if config.script is not None and config.script.command:
            raise no_script(name)
        folder = _folder_of(rank, world_size, config)
    except LabError as error:
        print(f"dlojz: {error}", file=sys.stderr)
        return 2
    if rank == 0:
        print(say(en=f"dlojz: measured in {folder}", fr=f"dlojz : mesuré dans {folder}"), file=sys.stderr, flush=True)
    origin_s = time.perf_counter() if world_size == 1 else None  # one process needs no common origin
    return worker.script_main(folder, ProcessIdentity(str(folder), rank, world_size, origin_s))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
