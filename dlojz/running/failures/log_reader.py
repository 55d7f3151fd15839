"""Read anybody's logs in a stream: which rank printed what, the first errors of each, and when.

A log may be larger than memory: of each rank its errors, the text around them and its last lines are kept. Ranks are
told apart by prefix (`[rank3]:`, `[default3]:`, `3: ` of srun, `[1,3]<stderr>:` of mpirun), or by the file's name. A
flight recorder's dump is read as JSON, never as a pickle.
"""

from __future__ import annotations

import gzip
import io
import json
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dlojz.base.language import refusal, say
from dlojz.processes.hang_diagnosis import calls_in
from dlojz.running.ending import CALL, EXCEPTION, TRACEBACK, split_rank
from dlojz.running.failures.diagnosis import Calls
from dlojz.running.failures.signatures import Signature, phase_of, recognise
from dlojz.running.folder import visible

STDIN = "-"
Watch = Callable[[int], object]
_WATCHED_LINES = 2**16
KEPT_CHARACTERS, KEPT_LINES, KEPT_FRAMES = 32 * 1024, 8, 60
"""Of each rank: text of its errors, last lines; of a traceback: last frames."""
_LINE_CHARACTERS, _DUMP_BYTES = 64 * 1024, 64 * 1024**2
_COLOURS = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07)")
_EXCEPTION_NAME = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Interrupt)(?::|$)")
_FRAME = re.compile(r'^\s*File "(?P<path>[^"]+)", line (?P<line>\d+), in (?P<name>.+)')
# As rich draws it, for accelerate, Lightning and typer: `│ /data/u/train.py:31 in main │`, `│ ❱ 31   loss = … │`.
_BOXED_FRAME = re.compile(r"^│\s*(?P<path>\S+):(?P<line>\d+) in (?P<name>\S+)")
_BOXED_CODE = re.compile(r"^│ ❱\s*\d+\s+(?:│\s)?(?P<code>.*?)\s*│?$")
_LIBRARIES = re.compile(r"site-packages|dist-packages|lib/python\d|^<|bin/(?:torchrun|accelerate|deepspeed)")
_STAMP = re.compile(
    r"(?P<date>\d{4}-\d\d-\d\d)[ T_](?P<time>\d\d:\d\d:\d\d)|\b[IWEF](?P<month_day>\d{3,4}) (?P<clock>\d\d:\d\d:\d\d)"
)
_TABLE_RANK = re.compile(r"^\s*rank\s+: (\d+) \(local_rank")
_LOCAL_RANK = re.compile(r"local_rank: (\d+)(?: \(pid: (\d+)\))?")
_PID = re.compile(r"\(pid: (\d+)\)")
# A launcher that starts ranks of its own: srun's tasks are then nodes and not ranks.
_AGENT = re.compile(r"torch[./]distributed[./](?:run|elastic|launcher)\b")
_SRUN_TASK = re.compile(r"\btasks? \d[\d,-]*: ")
# What went wrong before the one counts no longer after the other.
_RESTARTS = re.compile(r"will restart worker group")
_SUCCEEDED = re.compile(r"WorkerState\.SUCCEEDED|worker group successfully finished")
_GOES_ON = re.compile(r"(?i)\bretry|\bretri|\bfall(?:ing)? ?back|\binstead\b|\bskip(?:s|ping|ped)?\b|\w+Warning: ")
_STEP = re.compile(r"(?i)\b(?:step|iter(?:ation)?|epoch|époque)\W{0,10}\d")
_STEPS_AFTER = 5
# A line (no exception) of these kinds is over when steps of the training come after it.
_SOFT, _STEPS_AFTER_SOFT = ("import", "version", "network", "file", "port", "config"), 2
_SOFT_NAMES = ("nccl-cuda", "build-failed")
_LOGGED = re.compile(r"\b(?:ERROR|CRITICAL|WARN(?:ING)?)\b")
_OF_RANK = re.compile(r"\(RANK (\d+)\)$")
_SPAWNED = re.compile(r"^-- Process (\d+) terminated with the following error")
_WORLD = re.compile(
    r"(?i)(?:\bworld[_ ]?size\W{1,3}|\bnranks |MEMBER: \d+/|--nproc[-_]per[-_]node[= ]|expected world size )(\d+)"
)
# Lower case; a line without one of these words is passed over, which is what makes gigabytes readable.
_OF_INTEREST = re.compile(
    "error|fail|kill|signal|cancel|oom|memory|nan|timed out|timeout|closed|refused|denied|limit|"
    "space left|quota|symbol|fault|abort|assert|exit|in use|not found|no such|mismatch|traceback|interrupt|"
    "rank  |world|nranks|member: |nproc|divisible|xid|unreachable|resolution|resolve|detected|dtensor|sigterm|"
    r"joined|preempt|unable|no route|illegal|reset by peer|broken pipe|warn|what\(\):|-- process|not exist|cuda|"
    r"fallen off|torch_distributed|terminat|scale|ignored in|key\(s\)|across_processes|raisedexc|restricted|gated|"
    r"out of resource|will restart|success|\binf\b|watchdog|invalid|requeue|corrupt|malloc|free\(\)|"
    "evict|low on resource|an attempt|"
    "arrêté|erreur|introuvable|aucun|espace|accordée|refusée|déjà|inconnu|illégale"
)
# What follows an exception and still belongs to its message.
_CONTINUES = re.compile(
    r"^(?:\s+\S|nccl\w+:|Last error|CUDA kernel|Compile with|For debugging|making sure|Parameter indices"
    r"|Check(?:out)? your|Make sure|Please |Repository Not Found|Set TORCH|You can |Cannot access|Access to )"
)
_READ = re.compile(r"(?:\.(?:log|out|err|txt|json|stdout|stderr)(?:\.gz|\.\d+)?|\.[oe]\d+|^[^.]+)$")
_RANK_OF_FILE = re.compile(r"(?:^|[._-])rank[._-]?(\d+)(?=[._-]|$)", re.IGNORECASE)


@dataclass
class LogEvent:
    """First appearance of an error in the log of a rank; an exception's text has the lines below it.

    `order` is its file and line; `place` the user's code, `train.py:23 in main: loss.backward()`; `time` as logged;
    `count` how often it appeared, `ordinary_before` and `steps_before` the ordinary lines of its rank, and the lines
    about a step (of all ranks if none is named), before the last time.
    """

    rank: int | None
    text: str
    file: str
    order: tuple[int, int]
    signature: Signature | None = None
    match: re.Match[str] | None = None
    raised: bool = False
    place: str = ""
    phase: str = ""
    call: str = ""
    time: str = ""
    count: int = 1
    ordinary_before: int = 0
    steps_before: int = 0
    logged: bool = False
    last_time: str = ""
    caught: bool = False
    """Whether the program's logger printed it and steps of the training came after it, or torchrun's restart did."""

    @property
    def name(self) -> str:
        """Name of its signature, or of its exception."""
        return self.signature.name if self.signature else self.text.partition(":")[0].strip()

    @property
    def soft(self) -> bool:
        """Whether it is a line, and no exception, after which a training may go on."""
        signature = self.signature
        if self.raised or signature is None or _EXCEPTION_NAME.match(self.text):
            return False
        return signature.kind in _SOFT or signature.name in _SOFT_NAMES

    @property
    def weak(self) -> bool:
        """Whether it proves little: programs go on after such a line, or it says itself that they do."""
        if self.caught or self.raised or self.signature is None:
            return self.caught
        if self.match and self.match.groupdict().get("sure"):
            return False
        # Without its traceback, in a log that was cut, an exception still begins with its name.
        return _GOES_ON.search(self.text) is not None or (self.signature.weak and not _EXCEPTION_NAME.match(self.text))


@dataclass
class _Stream:
    """State of the traceback that one rank is printing."""

    frames: deque[str] | None = None
    pending: list[str] = field(default_factory=list)
    begin: int = 0
    time: str = ""
    ignored: bool = False
    owner: int | None = None
    """Whose it is, where another rank prints it."""
    prefix: re.Pattern[str] | None = None
    """What a collector of logs, or torchrun's table, writes before each line of it: a time, a host."""
    logged: bool = False
    cut: bool = False
    """Whether its first line is missing, so that only the name of an exception ends it."""


@dataclass
class LogEvidence:
    """What was read of one job's logs: its events, the text that the rules read, and the last lines."""

    events: list[LogEvent] = field(default_factory=list)
    texts: dict[int | None, str] = field(default_factory=dict)
    tails: dict[int | None, deque[str]] = field(default_factory=dict)
    last_times: dict[int | None, str] = field(default_factory=dict)
    calls: dict[int, Calls] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)
    ordinary_lines: Counter[int | None] = field(default_factory=Counter)
    """Lines of each rank that tell of nothing: after an error they show that the program went on."""
    world_size: int = 0
    cut_tracebacks: dict[int | None, str] = field(default_factory=dict)
    """Ranks whose log ends in a traceback, before its exception; and the user's line in it."""
    failed_first: tuple[int, str] | None = None
    """Rank and exit code of torchrun's "Root Cause (first observed failure)"."""
    steps: Counter[int | None] = field(default_factory=Counter)
    """Lines about a step of each rank, and of a log's lines without one."""
    step_times: dict[int | None, deque[str]] = field(default_factory=dict)
    """When each rank printed its last lines about a step."""


class LogReader:
    """Reader of the lines of one job, file after file."""

    def __init__(self) -> None:
        self.evidence = LogEvidence()
        self._first_of: dict[tuple[int | None, str], LogEvent] = {}
        self._begin("", None)

    def _begin(self, name: str, rank: int | None) -> None:
        self._file, self._file_rank, self._number, self._time = name, rank, 0, ""
        self._streams: dict[int | None, _Stream] = {}
        self._table_rank: int | None = None
        self._in_root_cause = self._has_agent = False
        self._of_pid: dict[str, LogEvent] = {}
        self._before_restart: list[LogEvent] = []

    def read(self, name: str, lines: Iterable[str], rank: int | None = None) -> None:
        """Read one file; `rank` is whose lines those without a prefix are."""
        self._begin(name, rank)
        self.evidence.files.append(name)
        for number, raw in enumerate(lines, start=1):
            self._number = number
            # A progress bar writes its states into one line; an error may stand between them.
            for segment in raw.rstrip("\r\n").split("\r"):
                if segment and not segment.isspace():
                    self._line(_COLOURS.sub("", segment) if "\x1b" in segment else segment)
        for owner, stream in self._streams.items():
            if stream.frames and not (stream.pending or stream.ignored):
                self.evidence.cut_tracebacks[owner] = _users_line(list(stream.frames))
            self._close(owner, stream)
        for event in self.evidence.events:
            times = self.evidence.step_times.get(event.rank, ())
            event.caught |= event.logged and len(times) == _STEPS_AFTER and min(times) > event.last_time
            event.caught |= event.soft and self._steps(event.rank) - event.steps_before >= _STEPS_AFTER_SOFT

    def _steps(self, rank: int | None) -> int:
        return self.evidence.steps.total() if rank is None else self.evidence.steps[rank]

    def _line(self, raw: str) -> None:
        rank, line = split_rank(raw)
        if rank is None:
            rank = self._file_rank
        else:
            self.evidence.ranks.add(rank)
        stream = self._streams.get(rank)
        if stream is None:
            stream = self._streams.setdefault(rank, _Stream())
        tail = self.evidence.tails.setdefault(rank, deque(maxlen=KEPT_LINES))
        tail.append(raw[:300])
        is_step = _STEP.search(line) is not None
        self.evidence.steps[rank] += is_step
        stamp = _STAMP.search(raw[:120])
        if stamp:
            month_day = (stamp["month_day"] or "").zfill(4)
            date = stamp["date"] or f"{month_day[:2]}-{month_day[2:]}"
            self._time = f"{date} {stamp['time'] or stamp['clock']}"
            self.evidence.last_times[rank] = self._time
            if is_step:
                self.evidence.step_times.setdefault(rank, deque(maxlen=_STEPS_AFTER)).append(self._time)
        if stream.frames is not None and not stream.frames and (begin := line.find('  File "')) > 0:
            stream.prefix = re.compile(re.sub(r"\d+", r"\\d+", re.escape(line[:begin])))
        if stream.prefix and (prefix := stream.prefix.match(line)):
            line = line[prefix.end() :]
        if not line or line.isspace():
            return
        if stream.pending:
            # Lines below an exception belong to it while they are indented, or announced by a colon.
            if (
                len(stream.pending) < KEPT_LINES
                and TRACEBACK not in line
                and (_CONTINUES.match(line) or stream.pending[-1].rstrip().endswith(":"))
                and not stream.pending[0].rstrip().endswith(("ChildFailedError:", "RaisedException:"))
            ):
                stream.pending.append(line[:_LINE_CHARACTERS])
                self._keep(rank, raw)
                return
            self._close(rank, stream)
        if stream.frames is not None and self._in_traceback(rank, stream, raw, line):
            return
        if _FRAME.match(line):
            stream.frames, stream.cut = deque([line[:500]], maxlen=KEPT_FRAMES), True
        elif _OF_INTEREST.search(line.lower()):
            self._plain(rank, stream, raw, line)
        else:
            self.evidence.ordinary_lines[rank] += 1

    def _in_traceback(self, rank: int | None, stream: _Stream, raw: str, line: str) -> bool:
        """Take a line of a traceback; whether it is one."""
        frames = deque() if stream.frames is None else stream.frames
        if line[0] in "│╭╰":
            if boxed := _BOXED_FRAME.match(line):
                frames.append(f'  File "{boxed["path"]}", line {boxed["line"]}, in {boxed["name"]}'[:500])
            elif boxed := _BOXED_CODE.match(line):
                frames.append(f"    {boxed['code']}"[:500])
        elif line[0].isspace() or line.startswith(("|", "+")):
            frames.append(line[:500])
        elif (_EXCEPTION_NAME if stream.cut else EXCEPTION).match(line):
            stream.pending, stream.begin, stream.time = [line[:_LINE_CHARACTERS]], self._number, self._time
        else:
            stream.frames, stream.cut, stream.prefix = None, False, None
            return False
        self._keep(rank, raw)
        return True

    def _close(self, rank: int | None, stream: _Stream) -> None:
        """End a traceback: its exception, with the lines below it, becomes an event."""
        if stream.pending and not stream.ignored:
            frames = list(stream.frames or ())
            owner = rank if stream.owner is None else stream.owner
            event = self._add(owner, "\n".join(stream.pending), raised=True, number=stream.begin)
            if event:
                event.last_time, event.logged = stream.time, stream.logged
            if event and event.order[1] == stream.begin and not event.place:
                event.time = stream.time
                event.place = _users_line(frames)
                event.phase = phase_of(frames)
                event.call = next((match[1] for frame in reversed(frames) if (match := CALL.search(frame))), "")
        stream.frames, stream.pending, stream.owner, stream.prefix = None, [], None, None
        stream.ignored = stream.cut = False

    def _plain(self, rank: int | None, stream: _Stream, raw: str, line: str) -> None:
        if TRACEBACK in line:
            of_rank = _OF_RANK.search(line)
            # Of a worker, or of the ranks of a distributed checkpoint: what comes is the cause of what was just added.
            if "Original Traceback" in line or of_rank:
                self._forget_last(rank, "CheckpointException" if of_rank else "")
            stream.owner = int(of_rank[1]) if of_rank else None
            stream.frames, stream.cut = deque(maxlen=KEPT_FRAMES), False
            if line.startswith("  traceback :"):  # in torchrun's table, by `@record`
                stream.owner = self._table_rank
            header = [*self.evidence.tails[rank]][-2:][0] + line
            stream.logged = bool(_STAMP.search(header[:120]) and _LOGGED.search(header))
            self._keep(rank, raw)
            return
        if spawned := _SPAWNED.match(line):
            self._file_rank = int(spawned[1])
        if "Exception ignored in" in line:
            stream.ignored = True
        self._has_agent = self._has_agent or _AGENT.search(line) is not None
        if _RESTARTS.search(line):
            for owner, ended in self._streams.items():  # their last exceptions are not events yet
                self._close(owner, ended)
            self._before_restart = [event for event in self.evidence.events if event.file == self._file]
        elif _SUCCEEDED.search(line):
            for event in self._before_restart:
                event.caught = True
        self._note_table(line)
        if world := _WORLD.search(line):
            self.evidence.world_size = max(self.evidence.world_size, min(int(world[1]), 2**20))
        if self._add(rank, line[:_LINE_CHARACTERS], raised=False, number=self._number):
            self._keep(rank, raw)

    def _note_table(self, line: str) -> None:
        """Follow torchrun's table of failures: whose exit code a line tells, and which rank failed first."""
        if line.startswith("Root Cause"):
            self._in_root_cause = True
        elif table := _TABLE_RANK.match(line):
            self._table_rank = int(table[1])
            self.evidence.ranks.add(self._table_rank)
        elif line.lstrip().startswith("exitcode") and self._table_rank is not None:
            # Only the table knows the rank of a process on a node that is not the first.
            if (pid := _PID.search(line)) and (event := self._of_pid.pop(pid[1], None)):
                event.rank = self._table_rank
            if self._in_root_cause:
                code = line.partition(":")[2].split()
                self.evidence.failed_first = self.evidence.failed_first or (self._table_rank, code[0] if code else "")
                self._in_root_cause = False

    def _add(self, rank: int | None, text: str, *, raised: bool, number: int) -> LogEvent | None:
        recognised = recognise(text)
        if recognised is None and not raised:
            return None
        signature, match = recognised or (None, None)
        local_rank = None
        if match and (named := next((match[key] for key in ("rank", "rank2") if match.groupdict().get(key)), None)):
            rank = None if self._has_agent and _SRUN_TASK.search(text) else int(named)
        elif signature and signature.role in ("killed", "lost", "report") and not raised:
            local_rank = _LOCAL_RANK.search(text)
            table_rank = self._table_rank if text[0].isspace() else None
            rank = int(local_rank[1]) if local_rank else table_rank if table_rank is not None else rank
        if rank is not None:
            self.evidence.ranks.add(rank)
        order = (len(self.evidence.files), number)
        event = LogEvent(rank, text, self._file, order, signature, match, raised, time=self._time)
        first = self._first_of.setdefault((rank, event.name), event)
        first.ordinary_before = self.evidence.ordinary_lines[event.rank]
        first.steps_before = self._steps(event.rank)
        if first is event:
            self.evidence.events.append(event)
        elif first.caught or (raised and first.weak):
            # What was only mentioned before, or was over, has now ended the program.
            event.count, event.ordinary_before = first.count + 1, first.ordinary_before
            event.steps_before = first.steps_before
            self.evidence.events[self.evidence.events.index(first)] = first = event
            self._first_of[rank, event.name] = event
        else:
            first.count += 1
        if local_rank and local_rank[2]:
            self._of_pid[local_rank[2]] = first
        return first

    def _forget_last(self, rank: int | None, name: str) -> None:
        events = self.evidence.events
        if events and events[-1].rank == rank and events[-1].name.endswith(name):
            event = self.evidence.events.pop()
            self._first_of.pop((event.rank, event.name), None)

    def _keep(self, rank: int | None, raw: str) -> None:
        text = self.evidence.texts.get(rank, "")
        if len(text) < KEPT_CHARACTERS:
            self.evidence.texts[rank] = f"{text}{raw[:2000]}\n"

    def read_dump(self, name: str, dump: object, rank: int | None) -> None:
        """Take the last collectives of one rank from its flight recorder, as JSON."""
        self.evidence.files.append(name)
        calls = calls_in(dump)
        if rank is not None and calls:
            self.evidence.ranks.add(rank)
            self.evidence.calls[rank] = {
                group: {int(call[0]): tuple(visible(str(word)) for word in call[1:]) for call in group_calls}
                for group, group_calls in calls.items()
            }


def _users_line(frames: list[str]) -> str:
    """Find the last line of a traceback that is no library's: `train.py:23 in main: loss.backward()`."""
    for index in range(len(frames) - 1, -1, -1):
        frame = _FRAME.match(frames[index])
        if frame and not _LIBRARIES.search(frame["path"]):
            code = frames[index + 1].strip() if index + 1 < len(frames) and not _FRAME.match(frames[index + 1]) else ""
            words = f"{Path(frame['path']).name}:{frame['line']} in {frame['name']}"
            return visible(f"{words}: {code}" if code else words)[:200]
    return ""


def rank_of(path: Path) -> int | None:
    """Read from a file's name, or torchrun's folders, whose log it is; None where they do not say."""
    named = _RANK_OF_FILE.search(path.name) or _RANK_OF_FILE.search(path.parent.name)
    if named:
        return int(named[1])
    return int(path.parent.name) if path.stem in ("stdout", "stderr") and path.parent.name.isdigit() else None


def _lines(file: io.BufferedReader | gzip.GzipFile, watch: Watch | None) -> Iterator[str]:
    """Decode line by line; a line without an end comes in pieces, so that none fills the memory."""
    begin = file.peek(4096)[:4096]
    encoding = "utf-16" if begin.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    if encoding != "utf-16" and b"\0" in begin:
        raise UnicodeError
    num_characters = 0
    text = io.TextIOWrapper(file, encoding=encoding, errors="replace", newline="\n")
    for number, line in enumerate(iter(lambda: text.readline(_LINE_CHARACTERS), "")):
        if watch and number % _WATCHED_LINES == _WATCHED_LINES - 1:
            watch(num_characters)
        num_characters += len(line)
        yield line


def _read_file(reader: LogReader, path: Path, name: str, watch: Watch | None) -> None:
    evidence = reader.evidence
    try:
        with gzip.GzipFile(path) if path.suffix == ".gz" else path.open("rb") as file:
            if path.suffix == ".json":
                content = file.read(_DUMP_BYTES)
                dump = json.loads(content) if b'"entries"' in content else None
                rank = rank_of(path)
                digits = re.findall(r"\d+", path.stem)
                reader.read_dump(name, dump, int(digits[-1]) if rank is None and digits else rank)
                return
            reader.read(name, _lines(file, watch), rank_of(path))
    except UnicodeError:
        evidence.notes.append(
            say(
                en=f"{name} is binary and was not read (torch’s flight recorder is read as JSON only).",
                fr=f"{name} est binaire et n’a pas été lu (l’enregistreur de torch ne se lit qu’en JSON).",
            )
        )
    except (OSError, EOFError, ValueError) as error:
        reason = visible(getattr(error, "strerror", None) or str(error) or type(error).__name__)[:200]
        evidence.notes.append(
            say(en=f"{name} could not be read: {reason}.", fr=f"{name} n’a pas pu être lu : {reason}.")
        )


def _job_of(path: Path, root: Path) -> str:
    """Name the job that a file of a folder belongs to: the number in its name, or its first folder."""
    number = re.search(r"\d{4,}", path.name)
    inner = path.relative_to(root).parts[:-1]
    no_job = inner and re.fullmatch(r"attempt_\d+|\d+|(?:rank|node)\W?\w*|logs?", inner[0])
    return number[0] if number else "" if not inner or no_job else inner[0]


def read_logs(word: str, watch: Watch | None = None) -> dict[str, LogEvidence]:
    """Read a file, a folder or `-` (standard input); the evidence of each job, by its name, empty for the only one.

    Args:
        word: the path, or `-`.
        watch: called now and then with how many characters of a long file were read.

    Raises:
        LabError: if there is nothing to read.
    """
    root = Path("/dev/stdin" if word == STDIN else word)
    if not root.is_dir():
        reader = LogReader()
        _read_file(reader, root, root.name, watch)
        return {"": reader.evidence}
    paths = sorted(path for path in root.rglob("*") if _READ.search(path.name) and path.is_file())
    if not paths:
        raise refusal(
            en=f"{root} has no log (.log, .out, .err, .txt, .json): name its files.",
            fr=f"{root} n’a pas de journal (.log, .out, .err, .txt, .json) : nommez ses fichiers.",
        )
    readers: dict[str, LogReader] = {}
    for path in paths:
        reader = readers.setdefault(_job_of(path, root), LogReader())
        _read_file(reader, path, str(path.relative_to(root)), watch)
    return {job: reader.evidence for job, reader in readers.items()}
