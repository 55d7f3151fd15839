"""The job script: what a student would write by hand for this run on this machine.

Layer 5. Invariant: pure; every value is a number, matches a pattern, or is quoted, so that no name, path or machine
file can add a line or a command; the script is complete: `sbatch job.sh`, from its folder, sends the same run again.

Sources: sbatch(1), srun(1) and scontrol(1) of Slurm 22.05. `--signal` without `B:` reaches the tasks and not this
shell; since 22.05 srun no longer takes `--cpus-per-task` from the job; `scontrol requeue` keeps the job's number.
"""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import dlojz
from dlojz.config import RunConfig
from dlojz.launch.limits import Allocation
from dlojz.launch.machines import Machine
from dlojz.libraries import own_python
from dlojz.runs.owner import MODULE_PATTERN
from dlojz.schema import LabError
from dlojz.text import say

STOPPED_IN_TIME = 75
"""Exit code of ranks that saved before the time limit (EX_TEMPFAIL of sysexits.h: try again later)."""
LOG = "logs/slurm.log"
_JOB_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
_WORD_WITH_VARIABLE = re.compile(r"(\$[A-Za-z_][A-Za-z0-9_]*)(.*)")


@dataclass(frozen=True)
class Array:
    """A sweep as one job array: its folder, how many runs it has, how many of them may run at once."""

    folder: Path
    size: int
    at_once: int


def job_script(
    machine: Machine, config: RunConfig, asked: Allocation, folder: Path, *, worker_module: str, requeues: int
) -> str:
    """The text of `job.sh` of one run.

    Raises:
        LabError: if the folder's path holds a sign that the scheduler would read, or a name is no name.
    """
    head = say(
        en=f"# One run: {config.title}. Read it, change it, send it again from this folder: sbatch job.sh",
        fr=f"# Une exécution : {config.title}. Lisez, modifiez, renvoyez depuis ce dossier : sbatch job.sh",
    )
    lines = ["#!/bin/bash", head, *_directives(machine, asked, folder.name, folder, LOG)]
    lines += ["", *_preparation(machine, config), "", f"FOLDER={_quoted(folder)}"]
    return _text([*lines, *_run(asked, config, worker_module, requeues)])


def array_script(
    machine: Machine, config: RunConfig, asked: Allocation, array: Array, *, worker_module: str, requeues: int
) -> str:
    """The text of the job script of a sweep, whose tasks each take their run's folder from `folders.txt`.

    Args:
        config: one of the sweep, all of which ask for the same nodes.

    Raises:
        LabError: as `job_script`.
    """
    head = say(
        en=f"# A sweep of {array.size} runs, at most {array.at_once} at once: one task of the array each.",
        fr=f"# Un balayage de {array.size} exécutions, au plus {array.at_once} à la fois : une tâche chacune.",
    )
    lines = ["#!/bin/bash", head, *_directives(machine, asked, array.folder.name, array.folder, "logs/%a.log")]
    lines += [f"#SBATCH --array=0-{array.size - 1}%{array.at_once}", "", *_preparation(machine, config), ""]
    lines += [
        say(
            en="# The run of this task: its line of the list.",
            fr="# L’exécution de cette tâche : sa ligne dans la liste.",
        ),
        f'FOLDER=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {_quoted(array.folder / "folders.txt")})',
        f'exec >> "$FOLDER/{LOG}" 2>&1',
    ]
    return _text([*lines, *_run(asked, config, worker_module, requeues)])


def _directives(machine: Machine, asked: Allocation, name: str, folder: Path, log: str) -> list[str]:
    if not _JOB_NAME.fullmatch(name):
        raise LabError(f"{name[:100]!r} is no name of a job: it is made of letters, digits, '-', '_' and '.'.")
    memory = machine.memory_gib_per_node
    if memory is not None and not machine.exclusive:
        memory = max(1, memory * asked.ranks_per_node // machine.gpus_per_node)
    gres = f"{machine.gres}:{asked.ranks_per_node}" if machine.gres else None
    options = {
        "job-name": name,
        "comment": name,
        "chdir": _in_directive(folder),
        "output": log,
        "open-mode": "append",
        "partition": machine.partition,
        "constraint": machine.constraint,
        "account": asked.account,
        "qos": asked.qos,
        "reservation": asked.reservation,
        "nodes": asked.nodes,
        "ntasks-per-node": asked.ranks_per_node,
        "gres": gres,
        "cpus-per-task": machine.cpus_per_gpu,
        "mem": f"{memory}G" if memory is not None else None,
        "hint": "nomultithread" if machine.nomultithread else None,
        "time": f"{asked.minutes // 60:02d}:{asked.minutes % 60:02d}:00",
        "signal": f"USR2@{asked.warning_s}",
    }
    written = [f"#SBATCH --{key}={value}" for key, value in options.items() if value not in (None, "")]
    return [*written, *(["#SBATCH --exclusive"] if machine.exclusive else []), "#SBATCH --requeue"]


def _preparation(machine: Machine, config: RunConfig) -> list[str]:
    """Modules, environments and variables, and the interpreter."""
    lines = [" ".join(_word(word) for word in line) for line in machine.setup]
    variables = dict(machine.environment)
    if config.device == "cpu" or machine.device == "cpu":
        variables.setdefault("DS_ACCELERATOR", "cpu")
    lines += [f"export {name}={_word(value)}" for name, value in variables.items()]
    package = Path(dlojz.__file__ or "").parent.parent
    return [
        *lines,
        "set -u",
        f"export PYTHONPATH={_quoted(package)}${{PYTHONPATH:+:$PYTHONPATH}}",
        "export PYTHONUNBUFFERED=1",
        f"PYTHON={_python(machine, config)}",
    ]


def _python(machine: Machine, config: RunConfig) -> str:
    """The interpreter: of the environment that the run's library has of its own, else of the machine, else this one."""
    own = own_python(config)
    if own is None and machine.python:
        return _word(machine.python)
    return _quoted(own or Path(sys.executable))


def _run(asked: Allocation, config: RunConfig, worker_module: str, requeues: int) -> list[str]:
    if not re.fullmatch(MODULE_PATTERN, worker_module):
        raise LabError(f"{worker_module[:100]!r} is no name of a Python module.")
    return [
        "",
        say(
            en="# Cancelled or out of time, this shell gets SIGTERM: it lives on to write down how the run ended.",
            fr="# Annulé ou à court de temps, ce shell reçoit SIGTERM : il survit pour noter comment cela a fini.",
        ),
        "stopped=0",
        "trap 'stopped=1' TERM",
        "",
        say(
            en=f"# One task per rank: {config.layout.world_size} in all. If one fails, the others are stopped.",
            fr=f"# Une tâche par rang : {config.layout.world_size} en tout. Si l’une échoue, les autres sont arrêtées.",
        ),
        'srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \\',
        f'  "$PYTHON" -P -m dlojz.launch.slurm_rank "$FOLDER" {worker_module}',
        "code=$?",
        "",
        say(
            en=f"# {STOPPED_IN_TIME}: told {asked.warning_s} s before the time limit, the ranks saved a checkpoint. "
            "Back into the queue.",
            fr=f"# {STOPPED_IN_TIME} : prévenus {asked.warning_s} s avant la limite de temps, les rangs ont "
            "sauvegardé. Retour dans la file.",
        ),
        f'if [ "$code" -eq {STOPPED_IN_TIME} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {requeues} ]; then',
        '  scontrol requeue "$SLURM_JOB_ID" && exit 0',
        "fi",
        '"$PYTHON" -P -m dlojz.launch.finish "$FOLDER" "$code" --stopped "$stopped" --ran-s "$SECONDS"',
        'exit "$code"',
    ]


def _word(word: str) -> str:
    """A checked word of a machine file: quoted, but for a variable at its beginning."""
    found = _WORD_WITH_VARIABLE.fullmatch(word)
    return f'"{found[1]}"{shlex.quote(found[2]) if found[2] else ""}' if found else shlex.quote(word)


def _quoted(path: Path) -> str:
    return shlex.quote(_printable(path))


def _in_directive(path: Path) -> str:
    """A path as sbatch reads it: between double quotes, wherein it must hold neither these nor a backslash."""
    text = _printable(path)
    if '"' in text or "\\" in text or "%" in text:
        raise LabError(_refused(text))
    return text if re.fullmatch(r"[A-Za-z0-9._/@+-]+", text) else f'"{text}"'


def _printable(path: Path) -> str:
    text = str(path)
    if not path.is_absolute() or any(not sign.isprintable() for sign in text):
        raise LabError(_refused(text))
    return text


def _refused(path: str) -> str:
    return say(
        en=f'the folder {path!r} cannot be told to the scheduler: it holds one of the signs " \\ % or a control '
        "character; set root= or $DLOJZ_RUNS to another one.",
        fr=f'le dossier {path!r} ne peut pas être donné à l’ordonnanceur : il contient un des signes " \\ % ou un '
        "caractère de contrôle ; choisissez-en un autre avec root= ou $DLOJZ_RUNS.",
    )


def _text(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"
