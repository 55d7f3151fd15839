"""Write a job script and submit it.

Every value in the script is a number, matches a pattern, or is quoted, so that no name, path or machine file can add a
line or a command. The script is complete: `sbatch job.sh`, from its folder, sends the same run again.

The run's folder names its job before the job exists, so that after a crash the job is found by that name. A submission
that was refused leaves a run that has failed and says why, never one that seems to wait.

Sources: sbatch(1), srun(1) and scontrol(1) of Slurm 22.05. `--signal` without `B:` reaches the tasks and not this
shell; since 22.05 srun no longer takes `--cpus-per-task` from the job; `scontrol requeue` keeps the job's number.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from dlojz.base.errors import LabError
from dlojz.base.files import CHECKOUT, write_atomic
from dlojz.base.language import Sentences, say
from dlojz.config.run_config import RunConfig
from dlojz.hardware.clusters import Machine
from dlojz.libraries.library_catalogue import own_python
from dlojz.running.folder import MODULE_PATTERN, Job, read_job
from dlojz.running.limits import JobRequest, NodeRequest
from dlojz.running.slurm.slurm_queue import UNCERTAIN, ask, explain_refusal, words_of
from dlojz.running.state import CANCEL, LOGS
from dlojz.running.store import record_refusal

phrase = Sentences(Path(__file__).parent / "data" / "slurm_job.md")

STOPPED_IN_TIME = 75
"""Exit code of ranks that saved before the time limit (EX_TEMPFAIL of sysexits.h: try again later)."""
LOG = "logs/slurm.log"
_JOB_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
_WORD_WITH_VARIABLE = re.compile(r"(\$[A-Za-z_][A-Za-z0-9_]*)(.*)")


@dataclass(frozen=True)
class Array:
    """Sweep as one job array: its folder, its number of runs, and how many of them may run at once."""

    folder: Path
    size: int
    at_once: int


def job_script(
    machine: Machine, config: RunConfig, node_request: NodeRequest, folder: Path, *, worker_module: str, requeues: int
) -> str:
    """Write the text of `job.sh` of one run.

    Raises:
        LabError: if the folder's path holds a character that the scheduler would interpret, or a name is illegal.
    """
    head = phrase("head of a run", config=config)
    lines = ["#!/bin/bash", head, *_directives(machine, node_request, folder.name, folder, LOG)]
    lines += ["", *_preparation(machine, config), "", f"FOLDER={_quoted(folder)}"]
    return _text([*lines, *_run(node_request, config, worker_module, requeues)])


def array_script(
    machine: Machine, config: RunConfig, node_request: NodeRequest, array: Array, *, worker_module: str, requeues: int
) -> str:
    """Write the text of the job script of a sweep, whose tasks each take their run's folder from `folders.txt`.

    Args:
        config: one of the sweep, all of which ask for the same nodes.

    Raises:
        LabError: as `job_script`.
    """
    head = phrase("head of a sweep", array=array)
    lines = ["#!/bin/bash", head, *_directives(machine, node_request, array.folder.name, array.folder, "logs/%a.log")]
    lines += [f"#SBATCH --array=0-{array.size - 1}%{array.at_once}", "", *_preparation(machine, config), ""]
    lines += [
        phrase("line of the list"),
        f'FOLDER=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {_quoted(array.folder / "folders.txt")})',
        f'exec >> "$FOLDER/{LOG}" 2>&1',
    ]
    return _text([*lines, *_run(node_request, config, worker_module, requeues)])


def _directives(machine: Machine, node_request: NodeRequest, name: str, folder: Path, log: str) -> list[str]:
    if not _JOB_NAME.fullmatch(name):
        raise LabError(f"{name[:100]!r} is no name of a job: it is made of letters, digits, '-', '_' and '.'.")
    # GiB: of whole nodes, or the share of the GPUs asked for where nodes are shared.
    memory = machine.memory_gib_per_node
    if memory is not None and not machine.exclusive:
        memory = max(1, memory * node_request.ranks_per_node // machine.gpus_per_node)
    gres = f"{machine.gres}:{node_request.ranks_per_node}" if machine.gres else None
    options = {
        "job-name": name,
        "comment": name,
        "chdir": _in_directive(folder),
        "output": log,
        # A requeued job goes on in the same log.
        "open-mode": "append",
        "partition": machine.partition,
        "constraint": machine.constraint,
        "account": node_request.account,
        "qos": node_request.qos,
        "reservation": node_request.reservation,
        "nodes": node_request.nodes,
        "ntasks-per-node": node_request.ranks_per_node,
        "gres": gres,
        "cpus-per-task": machine.cpus_per_gpu,
        "mem": f"{memory}G" if memory is not None else None,
        "hint": "nomultithread" if machine.nomultithread else None,
        "time": f"{node_request.minutes // 60:02d}:{node_request.minutes % 60:02d}:00",
        "signal": f"USR2@{node_request.warning_s}",
    }
    written = [f"#SBATCH --{key}={value}" for key, value in options.items() if value not in (None, "")]
    return [*written, *(["#SBATCH --exclusive"] if machine.exclusive else []), "#SBATCH --requeue"]


def _preparation(machine: Machine, config: RunConfig) -> list[str]:
    """Write the lines of modules, environments, variables and the interpreter."""
    module = [("module", "load", machine.torch_module)] if machine.torch_module else []
    lines = [" ".join(_word(word) for word in line) for line in (*machine.setup, *module)]
    variables = dict(machine.environment)
    if config.device == "cpu" or machine.device == "cpu":
        variables.setdefault("DS_ACCELERATOR", "cpu")
    lines += [f"export {name}={_word(value)}" for name, value in variables.items()]
    return [
        *lines,
        "set -u",
        f"export PYTHONPATH={_quoted(CHECKOUT)}${{PYTHONPATH:+:$PYTHONPATH}}",
        "export PYTHONUNBUFFERED=1",
        f"PYTHON={_python(machine, config)}",
    ]


def _python(machine: Machine, config: RunConfig) -> str:
    """Return the interpreter: of the library's own environment, else of the machine file, else this one."""
    library_python = own_python(config)
    if library_python is None and machine.python:
        return _word(machine.python)
    return _quoted(library_python or Path(sys.executable))


def _run(request: NodeRequest, config: RunConfig, worker_module: str, requeues: int) -> list[str]:
    if not re.fullmatch(MODULE_PATTERN, worker_module):
        raise LabError(f"{worker_module[:100]!r} is no name of a Python module.")
    return [
        "",
        phrase("shell lives on"),
        "stopped=0",
        "trap 'stopped=1' TERM",
        "",
        phrase("one task per rank", config=config),
        'srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \\',
        f'  "$PYTHON" -P -m dlojz.running.slurm.slurm_rank "$FOLDER" {worker_module}',
        "code=$?",
        "",
        phrase("back into the queue", code=STOPPED_IN_TIME, request=request),
        phrase("scontrol must live"),
        f'if [ "$code" -eq {STOPPED_IN_TIME} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {requeues} ]; then',
        "  (trap '' TERM; exec scontrol requeue \"$SLURM_JOB_ID\") && exit 0",
        "fi",
        '"$PYTHON" -P -m dlojz.running.slurm.slurm_finish "$FOLDER" "$code" --stopped "$stopped" --ran-s "$SECONDS"',
        'exit "$code"',
    ]


def _word(word: str) -> str:
    """Quote a checked word of a machine file, but for a variable at its beginning."""
    # `$WORK/x y` becomes `"$WORK"'/x y'`: the variable is expanded, what follows is quoted.
    match = _WORD_WITH_VARIABLE.fullmatch(word)
    return f'"{match[1]}"{shlex.quote(match[2]) if match[2] else ""}' if match else shlex.quote(word)


def _quoted(path: Path) -> str:
    return shlex.quote(_printable(path))


def _in_directive(path: Path) -> str:
    """Quote a path for sbatch: between double quotes, so that it must hold neither these nor a backslash."""
    text = _printable(path)
    # sbatch replaces `%j` and the like by itself.
    if '"' in text or "\\" in text or "%" in text:
        raise LabError(_refused(text))
    return text if re.fullmatch(r"[A-Za-z0-9._/@+-]+", text) else f'"{text}"'


def _printable(path: Path) -> str:
    text = str(path)
    if not path.is_absolute() or any(not sign.isprintable() for sign in text):
        raise LabError(_refused(text))
    return text


def _refused(path: str) -> str:
    return phrase("folder refused", path=path)


def _text(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"


SCRIPT = "job.sh"
TIMEOUT_S = 60.0
_NUMBER = re.compile(r"(\d{1,18})(?:;.*)?")
# How far this computer's clock and the scheduler's may be apart.
_CLOCKS_S = 120.0


class _UncertainError(Exception):
    """The scheduler did not answer whether it took the job."""


def available() -> bool:
    """Return whether jobs can be submitted from this computer."""
    return shutil.which("sbatch") is not None


def submit(
    folder: Path,
    machine: Machine,
    config: RunConfig,
    node_request: NodeRequest,
    request: JobRequest,
    worker_module: str,
) -> Job:
    """Submit the run of a folder, which has just been claimed; return the job, as written in `job.json`.

    Raises:
        LabError: if the scheduler refuses (the run is recorded as failed, with its words), if it does not say
            whether it took the job (the run stays queued, and is found by its name), or the folder cannot be written.
    """
    job = Job(machine=machine.name, name=folder.name, submitted_utc=_now())
    with recorded([folder]):
        script = job_script(
            machine, config, node_request, folder, worker_module=worker_module, requeues=request.requeues
        )
        prepare(folder, script, job)
    return send(folder, [(folder, job)])[0]


@contextlib.contextmanager
def recorded(folders: Sequence[Path]) -> Iterator[None]:
    """Record an error before the submission as the end of these runs.

    Raises:
        LabError: with the error's message.
    """
    try:
        yield
    except (OSError, LabError) as error:
        reason = str(error)
        if isinstance(error, OSError):
            cause = error.strerror or error
            reason = say(en=f"the job cannot be written: {cause}.", fr=f"le travail ne peut pas être écrit : {cause}.")
        for folder in folders:
            record_refusal(folder, reason)
        raise LabError(reason) from None


def prepare(folder: Path, script: str, job: Job) -> None:
    """Write the job's files: its script, its log folder, and its name in `job.json`."""
    (folder / LOGS).mkdir(exist_ok=True)  # sbatch takes a job whose log folder is missing, and its end leaves no word
    (folder / CANCEL).unlink(missing_ok=True)
    write_atomic(folder / SCRIPT, script)
    (folder / SCRIPT).chmod(0o755)
    job.write(folder)


def send(folder: Path, runs: Sequence[tuple[Path, Job]]) -> list[Job]:
    """Submit the script of a folder, which serves one run or all those of a sweep, and record its number.

    Raises:
        LabError: as `submit`.
    """
    try:
        number = _sbatch(folder)
    except _UncertainError as error:
        # It may have taken the job all the same.
        number = _number_by_name(runs[0][1]) or ""
        if not number:
            raise phrase.refused("scheduler did not say", name=runs[0][1].name, error=error) from None
    except LabError as error:
        for run, _ in runs:
            record_refusal(run, str(error))
        raise
    return [_numbered(run, job, number) for run, job in runs]


def _numbered(folder: Path, job: Job, number: str) -> Job:
    numbered_job = Job(**{**job.to_dict(), "job_id": number})
    # The job is there: a full disk now loses nothing, since it is found by its name.
    with contextlib.suppress(OSError):
        numbered_job.write(folder)
    return numbered_job


def _sbatch(folder: Path) -> str:
    """Submit the folder's script; return the number of the job."""
    # Without `variables`, which sbatch would pass on to the job.
    answer = ask(["sbatch", "--parsable", SCRIPT], TIMEOUT_S, folder=folder, variables={})
    output = answer.out.strip()
    # A site's wrapper may greet first: the number is on the last line.
    match = _NUMBER.fullmatch(output.splitlines()[-1].strip()) if output else None
    if answer.code == 0 and match:
        return match[1]
    words = words_of(answer).replace("sbatch: error: ", "")
    if answer.code == 0 or UNCERTAIN.search(words):
        raise _UncertainError(words)
    raise LabError(refusal(words))


def refusal(words: str) -> str:
    """Write the message of a refusal: sbatch's own words, then their explanation where there is one."""
    meaning = explain_refusal(words)
    message = say(en=f"the scheduler refused the job: {words}", fr=f"l’ordonnanceur a refusé le travail : {words}")
    return f"{message.rstrip('.')}. {meaning[:1].upper()}{meaning[1:]}".strip()


def recover(folder: Path) -> Job | None:
    """Find and record the number of a job whose submitting process died before it did.

    Returns:
        the job with its number; None where the scheduler knows no job of this name, does not answer, or the folder
        names no job. A job that has started records its number itself (`slurm_rank`).
    """
    job = read_job(folder)
    if job is None or job.job_id:
        return job
    number = _number_by_name(job)
    return _numbered(folder, job, number) if number else None


def _number_by_name(job: Job) -> str | None:
    """Find the newest job of this name that was sent when `job.json` says, in the queue, then in the accounting."""
    try:
        sent_s = datetime.fromisoformat(job.submitted_utc).timestamp() - _CLOCKS_S
    except ValueError:
        sent_s = 0.0
    since = datetime.fromtimestamp(sent_s, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    questions = (
        # %F: the job's number, for an array that of the whole; %V: when it was submitted.
        ["squeue", "-h", "--states=all", f"--name={job.name}", "-o", "%F|%V"],
        ["sacct", "-n", "-X", "-P", f"--name={job.name}", f"--starttime={since}", "-o", "JobIDRaw,Submit"],
    )
    for question in questions:
        numbers = [number for number, at_s in _answers(question) if at_s >= sent_s]
        if numbers:
            return str(max(numbers))
    return None


def _answers(question: list[str]) -> list[tuple[int, float]]:
    """Return numbers and times of submission, from the lines that are complete."""
    answer = ask(question, TIMEOUT_S)
    answers = []
    for line in answer.out.splitlines() if answer.code == 0 else []:
        number, _, submit_time = line.strip().partition("|")
        with contextlib.suppress(ValueError):
            # In UTC, as `ENVIRONMENT` asks for.
            answers.append((int(number), datetime.fromisoformat(f"{submit_time}+00:00").timestamp()))
    return answers


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
