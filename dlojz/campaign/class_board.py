"""Class board: exercises, runs and hours of all students, from their folders, under pseudonyms.

The folders are somebody else's: they are only read, no link in them is followed, only regular files of a bounded size
are opened, and what cannot be read becomes one sentence. No sentence holds a name, so that pseudonyms hide them.
"""

from __future__ import annotations

import hmac
import itertools
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from dlojz.base.errors import LabError
from dlojz.base.files import config_folder
from dlojz.base.language import Sentences, refusal
from dlojz.labs.kit.lab import SCRIPT, LabProgress
from dlojz.results.record import DamagedRecordError, RunRecord, read_record
from dlojz.running.launch import is_replayed

MAX_STUDENTS, MAX_ENTRIES, MAX_RECORDS = 2000, 5000, 1000
MAX_RECORD_BYTES, MAX_PROGRESS_BYTES, MAX_READ_BYTES = 16 * 2**20, 64 * 1024, 256 * 2**20
MAX_PROBLEMS = 5
RUNS_FOLDERS = ("", "runs", "dlojz-runs")
_PROGRESS = re.compile(r"progress-(\d\d)\.json")
_EXERCISE = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")


@dataclass(frozen=True)
class Best:
    """Highest throughput of a student with one model."""

    model: str
    title: str
    global_batch: int
    samples_per_s: float


@dataclass
class Student:
    """One line of the board.

    Args:
        name: of the folder, or its pseudonym.
        done: lab → number of exercises done.
        scripts: labs whose own script was found right.
        scores: lab → challenge and its best score.
        lab, exercise, exercise_utc: exercise that was done last, and when; empty and None where none is.
        best: one per model, the highest throughput first.
        runs: finished runs that were measured, not replayed.
        replays: runs that were replayed.
        rank_hours: ranks × elapsed time of the finished runs, those left out whose time is not known.
        untimed: runs whose elapsed time is not known.
        last_utc: when an exercise was last done or a run last ended, as their files say.
        problems: what could not be read, in sentences.
    """

    name: str
    done: dict[str, int] = field(default_factory=dict)
    scripts: set[str] = field(default_factory=set)
    scores: dict[str, tuple[str, float]] = field(default_factory=dict)
    lab: str = ""
    exercise: str = ""
    exercise_utc: datetime | None = None
    best: list[Best] = field(default_factory=list)
    runs: int = 0
    replays: int = 0
    rank_hours: float = 0.0
    untimed: int = 0
    last_utc: datetime | None = None
    problems: list[str] = field(default_factory=list)


def read_class(folder: Path, call: Callable[[str], str] = str) -> list[Student]:
    """Read the folders of all students, by name.

    Args:
        folder: holds one folder per student; what is hidden or no folder is no student.
        call: from the name of a folder to what is shown.

    Raises:
        LabError: if the folder itself cannot be read.
    """
    try:
        # islice before sorted: of a folder with millions of entries only the first MAX_ENTRIES are read.
        names = sorted(entry.name for entry in itertools.islice(os.scandir(folder), MAX_ENTRIES))
    except OSError as error:
        raise refusal(
            en=f"the folder of the class, {folder}, cannot be read: {error.strerror}.",
            fr=f"le dossier de la classe, {folder}, est illisible : {error.strerror}.",
        ) from None
    visible = [name for name in names if not name.startswith(".")][:MAX_STUDENTS]
    students = []
    for name in visible:
        path = folder / name
        if path.is_symlink():
            students.append(Student(call(name), problems=[_problem("link")]))
        elif path.is_dir():
            students.append(_student(path, call(name)))
    return sorted(students, key=lambda student: student.name)


def _student(folder: Path, name: str) -> Student:
    student = Student(name)
    try:
        for root in _roots(folder, student):
            _read_progress(root, student)
            _read_runs(root, student)
    except OSError as error:  # it may vanish, or close itself, while it is read
        student.problems.append(_problem("unreadable", reason=error.strerror))
    student.best.sort(key=lambda best: -best.samples_per_s)
    return student


def _roots(folder: Path, student: Student) -> Iterator[Path]:
    """Where runs may lie: the folder itself, its runs/, and the runs/ of a checkout in it."""
    for name in RUNS_FOLDERS:
        root = folder / name
        if root.is_symlink():
            student.problems.append(_problem("link"))
        elif root.is_dir():
            yield root
    for entry in _entries(folder):
        if entry.is_dir(follow_symlinks=False) and entry.name not in RUNS_FOLDERS and not entry.name.startswith("."):
            root = Path(entry.path, "runs")
            if root.is_dir() and not root.is_symlink():
                yield root


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(itertools.islice(entries, MAX_ENTRIES))


def _read_progress(root: Path, student: Student) -> None:
    for entry in _entries(root):
        lab = _PROGRESS.fullmatch(entry.name)
        if lab is None or not _plain(Path(entry.path), MAX_PROGRESS_BYTES, student):
            continue
        progress = LabProgress(Path(entry.path))
        completion_times = {
            name: completion_time for name, completion_time in progress.read().items() if _EXERCISE.fullmatch(name)
        }
        # A student may have worked on one lab in several roots: the larger count stands, nothing is added up.
        student.done[lab[1]] = max(student.done.get(lab[1], 0), len(completion_times.keys() - {SCRIPT}))
        # SCRIPT stands for the lab's own script, which is no exercise.
        student.scripts |= {lab[1]} if SCRIPT in completion_times else set()
        scores = [(name, score) for name, score in progress.scores().items() if _EXERCISE.fullmatch(name)]
        for challenge, score in scores[:1]:
            if lab[1] not in student.scores or _is_better(lab[1], challenge, score, student.scores[lab[1]][1]):
                student.scores[lab[1]] = (challenge, score)
        for exercise, completion_time in completion_times.items():
            moment = _moment(completion_time)
            _active(student, moment)
            # Over all roots: the exercise done last may stand in another one.
            if moment is not None and (student.exercise_utc is None or moment > student.exercise_utc):
                student.exercise_utc, student.lab, student.exercise = moment, lab[1], exercise


def _is_better(lab: str, challenge: str, score: float, than: float) -> bool:
    """Return whether a challenge's score is better than an earlier one; False for one that the lab no longer has."""
    from dlojz.labs.kit.exercise import Challenge
    from dlojz.labs.kit.lab import NUMBERS, content_of

    exercises = content_of(lab).EXERCISES if lab in NUMBERS else ()
    return any(
        exercise.id == challenge and isinstance(exercise, Challenge) and exercise.is_better(score, than)
        for exercise in exercises
    )


def _read_runs(root: Path, student: Student) -> None:
    folders = [entry for entry in _entries(root) if entry.is_dir(follow_symlinks=False) and entry.name[:1] != "."]
    # A run's name begins with its time: the newest come first, so the limits below leave out the oldest.
    folders.sort(key=lambda entry: entry.name, reverse=True)
    if len(folders) > MAX_RECORDS:
        student.problems.append(_problem("many"))
    read_bytes = 0
    for entry in folders[:MAX_RECORDS]:
        path = Path(entry.path, "record.json")
        try:
            if not _is_there(path) or not _plain(path, MAX_RECORD_BYTES, student):
                continue
        except OSError:
            student.problems.append(_problem("closed"))
            continue
        read_bytes += path.stat().st_size
        # MAX_RECORD_BYTES bounds one file; this bounds what one folder of runs can make this process read.
        if read_bytes > MAX_READ_BYTES:
            student.problems.append(_problem("many"))
            return
        try:
            record = read_record(path)
        except LabError as error:
            student.problems.append(_problem("damaged" if isinstance(error, DamagedRecordError) else "newer"))
            continue
        # A record copied into another folder would be counted twice.
        if record.run_id != entry.name:
            student.problems.append(_problem("damaged"))
            continue
        _count(record, student)
        _active(student, _ended(record))


def _is_there(path: Path) -> bool:
    """Return whether there is such a file in a folder.

    Raises:
        OSError: if the folder cannot be entered.
    """
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True


def _count(record: RunRecord, student: Student) -> None:
    if is_replayed(record):
        student.replays += 1
        return
    student.runs += 1
    if record.elapsed_s is None:
        student.untimed += 1
    else:
        student.rank_hours += record.config.layout.world_size * record.elapsed_s / 3600
    footprint = record.footprint()
    rate = footprint.samples_per_s if footprint else None
    if record.status != "completed" or rate is None:
        return
    config = record.config
    best = Best(config.model, config.title, config.layout.global_batch, rate)
    # One entry per model: its fastest completed run.
    before = next((entry for entry in student.best if entry.model == best.model), None)
    if before is None or before.samples_per_s < rate:
        student.best = [entry for entry in student.best if entry is not before] + [best]


def _plain(path: Path, most_bytes: int, student: Student) -> bool:
    """Whether a file may be opened: no link, no pipe, not beyond its size; else a problem is noted."""
    try:
        # lstat looks at a link itself, not at what it points to.
        state = path.lstat()
    except OSError as error:
        student.problems.append(_problem("unreadable", reason=error.strerror))
        return False
    if stat.S_ISLNK(state.st_mode):
        student.problems.append(_problem("link"))
    elif not stat.S_ISREG(state.st_mode):
        student.problems.append(_problem("special"))
    elif state.st_size > most_bytes:
        student.problems.append(_problem("large", size=state.st_size, most=most_bytes))
    elif not os.access(path, os.R_OK):
        student.problems.append(_problem("closed file"))
    else:
        return True
    return False


def _active(student: Student, moment: datetime | None) -> None:
    """Note when the student was active; a clock that is ahead is not believed.

    A file's own time says nothing: that of a copy is when it was copied.
    """
    if moment is not None:
        moment = min(moment, datetime.now(UTC))
        student.last_utc = max(student.last_utc or moment, moment)


def _moment(written: str) -> datetime | None:
    """Read a time in UTC (ISO 8601); None where it is none."""
    try:
        moment = datetime.fromisoformat(written)
        # A time without a zone was written in UTC.
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def _ended(record: RunRecord) -> datetime | None:
    """Return when a run ended, as its record says; of one without, start and length."""
    ended, started = _moment(record.ended_utc), _moment(record.started_utc)
    if ended is None and started is not None:
        with suppress(OverflowError):
            return started + timedelta(seconds=record.elapsed_s or 0.0)
    return ended


_problem = Sentences(Path(__file__).with_name("data") / "board.md")
"""Say what is wrong, without the path, in which there is a name."""


def told_problems(student: Student) -> list[str]:
    """List the first few problems, each once with its count, and how many runs the hours leave out."""
    counts = {problem: student.problems.count(problem) for problem in dict.fromkeys(student.problems)}
    sentences = [problem if count == 1 else f"{count} × {problem}" for problem, count in counts.items()]
    if student.untimed:
        sentences.insert(0, _problem("untimed", count=student.untimed))
    return sentences[:MAX_PROBLEMS] + (["…"] if len(sentences) > MAX_PROBLEMS else [])


KEY_BYTES = 32
DIGITS = 10
"""Hexadecimal digits of a pseudonym: of 2000 names, two are alike with a probability below 2e-6."""


def key_file() -> Path:
    """Default path of the key: in the user's configuration, not in the folder of the class."""
    return config_folder() / "board.key"


def pseudonyms(path: Path | None = None) -> Callable[[str], str]:
    """Return a function from names to pseudonyms.

    Args:
        path: file of the key, made on first use with mode 0600.

    Raises:
        LabError: if the file holds no key, or can be neither read nor made.

    Source: HMAC, RFC 2104, with SHA-256.
    """
    path = path or key_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            # Made empty and closed to others first: at no moment can another user read the key.
            path.touch(mode=0o600)
            path.write_text(secrets.token_hex(KEY_BYTES) + "\n", "ascii")
        key = bytes.fromhex(path.read_text("ascii").strip())
    except OSError as error:
        raise refusal(
            en=f"the key of the pseudonyms, {path}, cannot be used: {error.strerror}; give another with --key.",
            fr=f"la clé des pseudonymes, {path}, est inutilisable : {error.strerror} ; donnez-en une autre avec --key.",
        ) from None
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise refusal(
            en=f"the file {path} holds no key of {KEY_BYTES} bytes: remove it, and a new one is made.",
            fr=f"le fichier {path} ne contient pas de clé de {KEY_BYTES} octets : supprimez-le, une autre sera créée.",
        )
    return lambda name: f"P-{hmac.new(key, os.fsencode(name), 'sha256').hexdigest()[:DIGITS]}"
