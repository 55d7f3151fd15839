"""The SLURM backend: a run's folder becomes a job.

Layer 5. Invariant: the folder names its job before the job exists, so that a crash at any moment is recovered by that
name; a number is written only if the scheduler gave one; a submission that was refused leaves a run that has failed and
says why, never one that seems to wait.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from dlojz.config import RunConfig
from dlojz.launch.limits import Allocation, Request
from dlojz.launch.machines import Machine
from dlojz.launch.slurm_refusals import UNCERTAIN, explain_refusal
from dlojz.launch.slurm_script import job_script
from dlojz.record import EventLog, write_atomic, write_record
from dlojz.runs.assemble import assemble
from dlojz.runs.ending import Ending
from dlojz.runs.job import Job, read_job
from dlojz.runs.logs import visible
from dlojz.runs.programs import clean_environment
from dlojz.runs.state import CANCEL, EVENTS, LAUNCHER_EVENTS, LOGS, RECORD, read_all_events, read_config
from dlojz.schema import LabError
from dlojz.text import say

SCRIPT = "job.sh"
TIMEOUT_S = 60.0
_NUMBER = re.compile(r"(\d{1,18})(?:;.*)?")
# How far this computer's clock and the scheduler's may be apart.
_CLOCKS_S = 120.0
_MOST_WORDS = 2000


class _UncertainError(Exception):
    """The scheduler did not say whether it took the job."""


def available() -> bool:
    """Whether jobs can be sent from this computer."""
    return shutil.which("sbatch") is not None


def submit(
    folder: Path, machine: Machine, config: RunConfig, asked: Allocation, request: Request, worker_module: str
) -> Job:
    """Send the run of a folder, which has just been claimed.

    Returns:
        the job, as it stands in `job.json`.

    Raises:
        LabError: if the scheduler refuses (the run is recorded as failed, with its words), if it does not say
            whether it took the job (the run stays queued, and is found by its name), or the folder cannot be written.
    """
    job = Job(machine=machine.name, name=folder.name, submitted_utc=_now())
    with recorded([folder]):
        script = job_script(machine, config, asked, folder, worker_module=worker_module, requeues=request.requeues)
        prepare(folder, script, job)
    return send(folder, [(folder, job)])[0]


@contextlib.contextmanager
def recorded(folders: Sequence[Path]) -> Iterator[None]:
    """What goes wrong before anything is sent becomes the end of these runs.

    Raises:
        LabError: that sentence.
    """
    try:
        yield
    except (OSError, LabError) as error:
        why = str(error)
        if isinstance(error, OSError):
            what = error.strerror or error
            why = say(en=f"the job cannot be written: {what}.", fr=f"le travail ne peut pas être écrit : {what}.")
        for folder in folders:
            record_refusal(folder, why)
        raise LabError(why) from None


def prepare(folder: Path, script: str, job: Job) -> None:
    """Write all that the job needs: its script, its log folder, and its name in `job.json`."""
    (folder / LOGS).mkdir(exist_ok=True)  # sbatch takes a job whose log folder is missing, and its end leaves no word
    (folder / CANCEL).unlink(missing_ok=True)
    write_atomic(folder / SCRIPT, script)
    (folder / SCRIPT).chmod(0o755)
    job.write(folder)


def send(folder: Path, runs: Sequence[tuple[Path, Job]]) -> list[Job]:
    """Send the script of a folder, which serves one run or all those of a sweep, and write down its number.

    Raises:
        LabError: as `submit`.
    """
    try:
        number = _sbatch(folder)
    except _UncertainError as error:
        number = _number_by_name(runs[0][1]) or ""
        if not number:
            raise LabError(
                say(
                    en=f"the scheduler did not say whether it took {runs[0][1].name}: {error}. Ask for the same run "
                    "again in a minute: it is found by its name if it was taken.",
                    fr=f"l’ordonnanceur n’a pas dit s’il a pris {runs[0][1].name} : {error}. Redemandez la même "
                    "exécution dans une minute : elle est retrouvée par son nom si elle a été prise.",
                )
            ) from None
    except LabError as error:
        for run, _ in runs:
            record_refusal(run, str(error))
        raise
    return [_numbered(run, job, number) for run, job in runs]


def _numbered(folder: Path, job: Job, number: str) -> Job:
    known = Job(**{**job.to_dict(), "job_id": number})
    # The job is there: a full disk now loses nothing, since it is found by its name.
    with contextlib.suppress(OSError):
        known.write(folder)
    return known


def _sbatch(folder: Path) -> str:
    """The number of the job that the folder's script has become."""
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", SCRIPT],
            cwd=folder,
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _UncertainError(f"sbatch did not answer within {TIMEOUT_S:g} s") from None
    except OSError as error:
        words = f"{error.strerror}: 'sbatch'"
        raise LabError(refusal(words)) from None
    out, err = (stream.decode("utf-8", "replace").strip() for stream in (done.stdout, done.stderr))
    # A site's wrapper may greet first: the number is on the last line.
    found = _NUMBER.fullmatch(out.splitlines()[-1].strip()) if out else None
    if done.returncode == 0 and found:
        return found[1]
    words = _one_line(err or out) or f"exit code {done.returncode}, without a word"
    if done.returncode == 0 or UNCERTAIN.search(words):
        raise _UncertainError(words)
    raise LabError(refusal(words))


def refusal(words: str) -> str:
    """What the student reads when sbatch refuses: its own words, then what they mean where we know."""
    meaning = explain_refusal(words)
    said = say(en=f"the scheduler refused the job: {words}", fr=f"l’ordonnanceur a refusé le travail : {words}")
    return f"{said.rstrip('.')}. {meaning[:1].upper()}{meaning[1:]}".strip()


def record_refusal(folder: Path, why: str) -> None:
    """Write down that a run never started, so that nobody waits for it."""
    with contextlib.suppress(OSError, LabError):
        config, events = read_config(folder), read_all_events(folder)
        log = EventLog(folder / EVENTS / LAUNCHER_EVENTS)
        log.write("end", status="failed", reason=why)
        log.close()
        write_record(folder / RECORD, assemble(folder.name, config, events, Ending("failed", why), 0.0))


def recover(folder: Path) -> Job | None:
    """Find the number of a job that was sent by a process which died before writing it down, and write it.

    Returns:
        the job with its number; None where the scheduler knows no job of this name, does not answer, or the folder
        names no job. A job that has started writes its number itself (`slurm_rank`).
    """
    job = read_job(folder)
    if job is None or job.job_id:
        return job
    number = _number_by_name(job)
    return _numbered(folder, job, number) if number else None


def _number_by_name(job: Job) -> str | None:
    """The newest job of this name that was sent when `job.json` says; asked of the queue, then of the accounting."""
    try:
        sent_s = datetime.fromisoformat(job.submitted_utc).timestamp() - _CLOCKS_S
    except ValueError:
        sent_s = 0.0
    since = datetime.fromtimestamp(sent_s, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    questions = (
        ["squeue", "-h", "--states=all", f"--name={job.name}", "-o", "%F|%V"],
        ["sacct", "-n", "-X", "-P", f"--name={job.name}", f"--starttime={since}", "-o", "JobIDRaw,Submit"],
    )
    for question in questions:
        found = [number for number, at_s in _answers(question) if at_s >= sent_s]
        if found:
            return str(max(found))
    return None


def _answers(question: list[str]) -> list[tuple[int, float]]:
    """Numbers and times of submission, from whichever lines are whole."""
    try:
        done = subprocess.run(
            question,
            env={**clean_environment(), "TZ": "UTC0", "SLURM_TIME_FORMAT": "standard"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = []
    for line in done.stdout.decode("utf-8", "replace").splitlines() if done.returncode == 0 else []:
        number, _, at = line.strip().partition("|")
        with contextlib.suppress(ValueError):
            found.append((int(number), datetime.fromisoformat(f"{at}+00:00").timestamp()))
    return found


def _one_line(words: str) -> str:
    return visible(" ".join(words.replace("sbatch: error: ", "").split()))[:_MOST_WORDS]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
