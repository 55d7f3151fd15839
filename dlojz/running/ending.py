"""Classify how a run ended, from exit codes, events and the first error of its logs, into a status and one sentence.

The cause is reported, never a consequence: when one rank dies, its peers lose the connection and fail too, but only the
rank that failed first is named.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dlojz.base.language import format_seconds
from dlojz.results.record import STATUSES, Status
from dlojz.running.folder import last_line, open_regular, visible

_OOM = re.compile(
    r"MemoryError|OutOfMemoryError|DefaultCPUAllocator: (?:can't|not enough)|CUDA out of memory|Cannot allocate memory"
)
# What SLURM writes into a job's output; a job over `--mem` is FAILED with 137 where there are no cgroups.
JOB_OOM = re.compile(r"exceeded (?:job |step )?memory limit|oom[-_ ]kill|Out Of Memory", re.IGNORECASE)
JOB_LATE = re.compile(r"DUE TO TIME LIMIT")
_JOB_NODE = re.compile(r"DUE TO NODE FAILURE")
_JOB_CANCELLED = re.compile(r"\*\*\* JOB .{0,200}CANCELLED AT")
PORT = re.compile(r"EADDRINUSE|[Aa]ddress already in use")
# What a rank says when its peer has gone (gloo, NCCL, the store): true, and never the cause.
PEER_GONE = re.compile(
    r"[Cc]onnection (?:was )?(?:closed|reset)|[Bb]roken pipe|[Ss]ocket (?:is )?closed|[Rr]ead error|[Ww]rite error"
    r"|remote process exited|peer (?:has )?(?:closed|exited)|Failed to recv|connectFullMesh|Stop_waiting response"
)

# What C++ and Python print when they abort.
_FATAL = re.compile(r"^(?: *what\(\): .*|Fatal Python error: .*)$", re.MULTILINE)


@dataclass(frozen=True)
class Ending:
    """Status of a run and the sentence that explains it (empty for a run that completed)."""

    status: Status
    reason: str = ""


@dataclass(frozen=True)
class JobEnd:
    """End of a run's job, as reported by its scheduler.

    Args:
        number: of the job; empty where it never had one.
        state: raw, e.g. `TIMEOUT`; empty where the scheduler no longer knows.
        reason: raw, e.g. `JobLaunchFailure`.
        exit_code: `code:signal`, where known.
        log: last part of the job's output.
        cancel_asked: whether somebody asked the run to stop.
    """

    number: str = ""
    state: str = ""
    reason: str = ""
    exit_code: str = ""
    log: str = ""
    cancel_asked: bool = False


@dataclass(frozen=True)
class EndEvidence:
    """Evidence of the end of a run.

    Args:
        stopped_by: why the launcher stopped it, if it did.
        exit_codes: by rank, negative for a signal; only of ranks that ended by themselves, and only non-zero ones.
        ends: status and sentence of the `end` event, by rank.
        steps: finished steps, by rank.
        log_tails: last part of the printed output, by rank.
        kernel_oom: whether the kernel killed a process for memory while the run lasted; None where that is not known.
        memory_of: whose memory the ranks share: of the machine, or of a job, container or group with a limit.
        torch_debug: value of TORCH_DISTRIBUTED_DEBUG, where it makes torch compare collectives; empty otherwise.
        cpu_limit_s: processor time that each rank may use; None without a limit, or where it is not known.
        disk_problem: why nothing more can be written into the run's folder; empty where something can.
        launcher: error of the launcher itself; `vanished` where it is gone.
        job: end of the run's job, where it had one.
        script: name of the user's script; empty for a run of the lab's.
        children: status and sentence of the processes that the script has started itself and that trained, by rank.
        untrained: why nothing was measured of a script; empty where something was.
    """

    world_size: int
    stopped_by: Literal["cancelled", "timeout", "removed"] | None = None
    exit_codes: Mapping[int, int] = field(default_factory=dict)
    ends: Mapping[int, tuple[Status, str]] = field(default_factory=dict)
    steps: Mapping[int, int] = field(default_factory=dict)
    log_tails: Mapping[int, str] = field(default_factory=dict)
    kernel_oom: bool | None = None
    memory_of: str = "the machine"
    torch_debug: str = ""
    cpu_limit_s: float | None = None
    disk_problem: str = ""
    time_limit_s: float | None = None
    launcher: str = ""
    job: JobEnd | None = None
    script: str = ""
    children: Mapping[int, tuple[Status, str]] = field(default_factory=dict)
    untrained: str = ""


def end_of(events: list[dict[str, Any]]) -> tuple[Status, str] | None:
    """Read status and sentence of the `end` event of the last start of a rank, or of a job, if it wrote one."""
    for event in reversed(events):
        if event["event"] in ("start", "started"):  # a run that was resumed has ended only once
            return None
        for status in STATUSES:
            if event["event"] == "end" and event.get("status") == status:
                return status, visible(str(event.get("reason") or ""))
    return None


def classify(evidence: EndEvidence) -> Ending:
    """Classify the end of a run by the first rule that applies."""
    # What a rank wrote of its end outranks a stop that came afterwards, and that outranks what exit codes and logs
    # suggest. The ends of job and launcher count only where no rank names a cause.
    rules = (
        *(_script_stopped, _completed, _measured, _stopped, _job_stopped, _child_failed, _out_of_memory, _killed),
        *(_failed, _job_left, _launcher),
    )
    endings = (rule(evidence) for rule in rules)
    ending = next((ending for ending in endings if ending), None) or _leftover(evidence)
    # A full disk explains a failure, not a run that diverged, ran out of memory or was stopped.
    if ending.status != "failed" or not evidence.disk_problem or evidence.disk_problem in ending.reason:
        return ending
    return Ending(
        "failed",
        f"{ending.reason.rstrip('.')}; nothing more can be written into the folder of the run: "
        f"{evidence.disk_problem}.",
    )


def _script_stopped(evidence: EndEvidence) -> Ending | None:
    """Classify a script that was asked to stop: it may handle the signal, and end as if it had completed."""
    if not evidence.script:
        return None
    interrupted = [end for end in evidence.ends.values() if end[0] == "cancelled"]
    if interrupted and evidence.stopped_by is None and evidence.job is None:
        return Ending(*interrupted[0])
    return _stopped(evidence)


def _completed(evidence: EndEvidence) -> Ending | None:
    ended = [status for status, _ in evidence.ends.values()]
    if evidence.script and not evidence.launcher and evidence.job is None:
        # Every exit code is known to be 0: a script that ends by `os._exit`, or a launcher, writes no end.
        outcome_known = any(evidence.steps.values()) or evidence.untrained
        ended += ["completed"] * (evidence.world_size - len(ended)) if outcome_known else []
    if evidence.exit_codes or ended != ["completed"] * evidence.world_size:
        return None
    if evidence.untrained:
        return Ending("failed", evidence.untrained)
    diverged = [Ending(*end) for end in evidence.children.values() if end[0] == "diverged"]
    return diverged[0] if diverged else Ending("completed")


def _child_failed(evidence: EndEvidence) -> Ending | None:
    """Classify by the first process of the script's own that failed: the one that started it only reports that."""
    for _, (status, reason) in sorted(evidence.children.items()):
        if status in ("failed", "oom") and reason and not PEER_GONE.search(reason):
            return Ending(status, reason)
    return None


def _measured(evidence: EndEvidence) -> Ending | None:
    """Classify divergence, lack of memory, or a stop that all ranks agreed on, by a rank's `end` event."""
    for expected_status in ("diverged", "oom", "timeout"):
        for rank, (status, reason) in sorted(evidence.ends.items()):
            if status == expected_status:
                return Ending(status, _by(rank, reason or f"it ended as {status}"))
    return None


def _launcher(evidence: EndEvidence) -> Ending | None:
    after = _after(_most_steps(evidence))
    if evidence.launcher == "vanished" and evidence.disk_problem:
        return Ending(
            "failed",
            f"the launcher could not write the record of the run, {after}: {evidence.disk_problem}; what had been "
            "measured is kept.",
        )
    if evidence.launcher == "vanished":
        return Ending(
            "failed",
            f"the launcher vanished {after}: it was killed, or the machine stopped; what had been measured is kept.",
        )
    return Ending("failed", f"the launcher failed {after}: {evidence.launcher}") if evidence.launcher else None


def _stopped(evidence: EndEvidence) -> Ending | None:
    if evidence.stopped_by is None:
        return None
    after = _after(_most_steps(evidence))
    if evidence.stopped_by == "timeout":
        limit = format_seconds(evidence.time_limit_s)
        return Ending("timeout", f"the time limit of {limit} was reached {after}; what had been measured is kept.")
    if evidence.stopped_by == "removed":
        return Ending("cancelled", f"the folder of the run was moved or removed {after}, and the run was stopped.")
    return Ending("cancelled", f"the run was cancelled {after}; what had been measured is kept.")


def _job_stopped(evidence: EndEvidence) -> Ending | None:
    """Classify time limit, node failure, preemption, lack of memory or cancellation of the job; ranks' errors later."""
    job = evidence.job
    if job is None:
        return None
    after, results_note = _after(_most_steps(evidence)), "what had been measured is kept"
    # A requeued job appends to its log: where the state is clear, the log of an earlier start does not count.
    log = job.log if job.state in ("", "FAILED", "CANCELLED") else ""
    # 137 is 128 + SIGKILL, as a shell reports it; `0:9` and `9:0` are SLURM's pairs code:signal.
    short = job.state == "OUT_OF_MEMORY" or job.exit_code in ("137:0", "0:9", "9:0") or JOB_OOM.search(log)
    memory_message = next((line.strip() for line in job.log.splitlines() if JOB_OOM.search(line)), "")[:300]
    memory_message = memory_message or (f"exit code {job.exit_code}" if job.exit_code else job.state)
    cases: tuple[tuple[object, Status, str], ...] = (
        (
            job.state in ("TIMEOUT", "DEADLINE") or JOB_LATE.search(log),
            "timeout",
            f"the time limit of the job {job.number} was reached {after}",
        ),
        (
            job.state in ("NODE_FAIL", "BOOT_FAIL") or _JOB_NODE.search(log),
            "failed",
            f"a node of the job {job.number} failed {after} ({job.state or 'NODE_FAIL'})",
        ),
        (
            job.state == "PREEMPTED",
            "failed",
            f"the job {job.number} had to give way to another one {after} (PREEMPTED)",
        ),
        (short, "oom", f"the job {job.number} ran out of memory {after} ({memory_message})"),
        (
            job.state == "CANCELLED" or job.cancel_asked or (not job.state and _JOB_CANCELLED.search(log)),
            "cancelled",
            f"the run was cancelled {after}",
        ),
    )
    return next((Ending(status, f"{words}; {results_note}.") for applies, status, words in cases if applies), None)


def _job_left(evidence: EndEvidence) -> Ending | None:
    """Classify a job that failed, where none of its ranks named a cause."""
    job = evidence.job
    if job is None:
        return None
    after = _after(_most_steps(evidence))
    if not job.number:
        return Ending(
            "failed", "the submission was interrupted before the scheduler had taken the job: submit it again."
        )
    raw = ", ".join(
        word for word in (job.state, job.reason, f"exit code {job.exit_code}" if job.exit_code else "") if word
    )
    output = last_line(job.log)
    how = f"the scheduler says: {raw}" if raw else "the scheduler no longer knows how"
    return Ending(
        "failed", f"the job {job.number} ended {after}; {how}{f'; its output ends with: {output}' if output else ''}."
    )


def _out_of_memory(evidence: EndEvidence) -> Ending | None:
    """Classify a rank that printed an allocation failure, or that the kernel killed for memory."""
    for rank, code in sorted(evidence.exit_codes.items()):
        final_line = last_line(evidence.log_tails.get(rank, ""))
        # A rank that wrote an `end` is classified by that, not by what it printed.
        if rank not in evidence.ends and code > 0 and _OOM.search(final_line):
            return Ending("oom", f"rank {rank} ran out of memory {_after(evidence.steps.get(rank, 0))}: {final_line}")
        if code == -signal.SIGKILL and evidence.kernel_oom:
            return Ending(
                "oom",
                f"rank {rank} was killed by the system {_after(evidence.steps.get(rank, 0))} because "
                f"{evidence.memory_of} ran out of memory.",
            )
    return None


def _killed(evidence: EndEvidence) -> Ending | None:
    """Classify a rank that a signal ended; SIGKILL first, since it is never a consequence."""
    for rank, code in sorted(evidence.exit_codes.items(), key=lambda item: (item[1] != -signal.SIGKILL, item[0])):
        if code < 0 and not _follows(evidence, rank):
            return Ending("failed", _signalled(evidence, rank))
    return None


def _follows(evidence: EndEvidence, rank: int) -> bool:
    """Return whether the signal that ended a rank followed from the loss of its peers."""
    code = evidence.exit_codes[rank]
    if code == -signal.SIGTERM:  # what the launcher sends to the peers of a rank that failed
        return True
    status, reason = evidence.ends.get(rank, (None, ""))
    lost = status == "cancelled" or PEER_GONE.search(reason) or PEER_GONE.search(evidence.log_tails.get(rank, ""))
    return code == -signal.SIGABRT and bool(lost)  # gloo's threads may abort when they are torn down


def _signalled(evidence: EndEvidence, rank: int) -> str:
    number = -evidence.exit_codes[rank]
    name = signal.Signals(number).name if number in set(signal.Signals) else "unknown"
    words = f"rank {rank} was killed by signal {number} ({name}) {_after(evidence.steps.get(rank, 0))}"
    limit = format_seconds(evidence.cpu_limit_s)
    if number == signal.SIGXCPU:
        return f"{words}: it had used the processor time that it may use (ulimit -t)."
    if number == signal.SIGKILL and evidence.cpu_limit_s is not None:
        return f"{words}: if nobody stopped it, it had used the {limit} of processor time that it may use (ulimit -t)."
    if number == signal.SIGKILL and evidence.kernel_oom is None:
        return f"{words}: if nobody stopped it, {evidence.memory_of} ran out of memory."
    if number == signal.SIGKILL:
        return f"{words}: somebody stopped it, or a limit of the machine did; the kernel killed nothing for memory."
    fatal_lines = _FATAL.findall(evidence.log_tails.get(rank, ""))
    if number == signal.SIGSEGV and evidence.torch_debug:
        return (
            f"{words}: TORCH_DISTRIBUTED_DEBUG={evidence.torch_debug} is set, with which some versions of torch "
            "crash: run it without."
        )
    return f"{words}: {last_line(fatal_lines[-1])}" if fatal_lines else f"{words}."


def _failed(evidence: EndEvidence) -> Ending | None:
    """Classify by the first rank whose message is a cause and not the loss of a peer."""
    for rank in range(evidence.world_size):
        status, message = evidence.ends.get(rank, (None, ""))
        code = evidence.exit_codes.get(rank, 0)
        if status is None and code > 0:
            message = last_line(evidence.log_tails.get(rank, ""))
            words = _exited(evidence, rank)
        elif status == "failed":
            words = _by(rank, message or "it failed without saying why")
        else:
            continue  # completed or stopped, or a signal ended it, which `_killed` has judged
        if PORT.search(message):
            return Ending(
                "failed",
                f"rank {rank} could not open its network port, because another program uses it "
                "(EADDRINUSE): run it again, a free port is chosen each time.",
            )
        if not PEER_GONE.search(message):
            return Ending("failed", words)
    return None


def _leftover(evidence: EndEvidence) -> Ending:
    """Report the first rank that did not complete, where no cause is known, even if it only lost a peer."""
    for rank, (status, reason) in sorted(evidence.ends.items()):
        if status != "completed":
            return Ending(status, _by(rank, reason or f"it ended as {status}"))
    for rank, code in sorted(evidence.exit_codes.items()):
        return Ending("failed", _exited(evidence, rank) if code > 0 else _signalled(evidence, rank))
    silent = next((rank for rank in range(evidence.world_size) if rank not in evidence.ends), 0)
    return Ending("failed", f"rank {silent} ended {_after(evidence.steps.get(silent, 0))} without saying how.")


def _exited(evidence: EndEvidence, rank: int) -> str:
    final_line = last_line(evidence.log_tails.get(rank, ""))
    after = _after(evidence.steps.get(rank, 0))
    return f"rank {rank} ended with exit code {evidence.exit_codes[rank]} {after}: {final_line}".rstrip(": ")


def _by(rank: int, reason: str) -> str:
    return reason if "rank" in reason else f"rank {rank}: {reason}"


def _after(steps: int) -> str:
    return f"after step {steps}" if steps else "before its first step was finished"


def _most_steps(evidence: EndEvidence) -> int:
    return max(evidence.steps.values(), default=0)


HEAD_BYTES, TAIL_BYTES = 1024 * 1024, 256 * 1024
_MOST_CHARACTERS = 300
# torchrun's `[default0]:` (a role and a local rank), torch's `[rank0]:`, `0: ` of srun --label, `[1,0]<stderr>:` of
# mpirun, and `[Rank 0]` of NCCL's watchdog before torch 2.2. Before torch's may stand the time or host that a collector
# of logs writes, or a progress bar that no newline ended.
_PREFIX = re.compile(
    r"^(?:(?:\[(?:default|rank|trainer|worker)|rank)(\d+)\]?:\s?|\s{0,4}(\d{1,5}): |\[\d+,(\d+)\]<std(?:err|out)>:\s?"
    r"|\[Rank (\d+)\](?= )|.{1,300}?\[rank(\d+)\]:\s?)"
)
TRACEBACK = "Traceback (most recent call last)"
EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Warning|Interrupt|Exit|Stopped|Wrong|NotDone)?(?::|$)")
_FAULT = re.compile(
    r"^(?:Fatal Python error: |.*\bwhat\(\):|.*\b(?:Segmentation fault|Bus error|Illegal instruction)\b"
    r"|.*: error while loading shared libraries|\[E\S* |.*\bNCCL WARN\b|.*\b(?:srun|slurmstepd): error: "
    r"|.*\b(?:FATAL|fatal error)\b|[\w./-]+: (?:line \d+: )?.*(?:command not found|No such file or directory|Killed))"
)
CALL = re.compile(
    r"(?:dist(?:ributed)?\.|, in )(all_\w+|reduce\w*|broadcast\w*|barrier|scatter\w*|gather\w*"
    r"|i?send|i?recv|monitored_barrier|batch_isend_irecv)\b"
)


@dataclass(frozen=True)
class FirstError:
    """First error of one log.

    Args:
        rank: whose log; None for the launcher's or the job's.
        text: its line, at most 300 characters, control characters made visible.
        line: its number, from 1, counted from the beginning of what was read.
        lost_peer: it only says that another rank has gone.
        call: the collective that the rank was in, by its traceback; empty where none is named.
    """

    rank: int | None
    text: str
    line: int
    lost_peer: bool = False
    call: str = ""


def split_rank(raw: str) -> tuple[int | None, str]:
    """Split a line into the rank that its prefixes name, None without one, and what follows them.

    The last of several counts: torchrun writes the local rank before torch's global one.
    """
    rank, line = None, raw
    while match := _PREFIX.match(line):
        # A number of the text itself, or a line that quotes another one.
        if rank is not None and (match[2] or (match[5] and "[rank" in raw[: -len(line)])):
            break
        rank, line = int(next(filter(None, match.groups()))), line[match.end() :]
    return rank, line


def first_error(text: str, rank: int | None = None) -> FirstError | None:
    """Find the first error of a log that is a cause; else the first that tells of a lost peer; None if none."""
    errors: list[FirstError] = []
    in_traceback, call = False, ""
    for number, raw in enumerate(text.splitlines(), start=1):
        _, line = split_rank(raw)
        if line.startswith(TRACEBACK):
            in_traceback, call = True, ""
        elif in_traceback:
            called = CALL.search(line)
            call = called[1] if called else call
            # The exception stands at the margin, below its frames; `|` and `+` draw exception groups.
            if line.strip() and not line[0].isspace() and not line.startswith(("|", "+")):
                if EXCEPTION.match(line):
                    errors.append(_error(rank, line, number, call))
                in_traceback = False
        elif _FAULT.match(line):
            errors.append(_error(rank, line, number, ""))
        # A cause ends the search. An error that only tells of a lost peer does not: the cause may follow.
        if errors and not errors[-1].lost_peer:
            return errors[-1]
    return errors[0] if errors else None


def _error(rank: int | None, line: str, number: int, call: str) -> FirstError:
    text = visible(line.strip())
    short = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"
    return FirstError(rank, short, number, bool(PEER_GONE.search(line)), call)


def read_log(path: Path) -> str:
    """Read a log, without the middle of a very long one; empty where there is none, or only a link."""
    file = open_regular(path)
    if file is None:
        return ""
    with file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(HEAD_BYTES)
        # The beginning has the first error, the end how it ended. They do not overlap in a log shorter than both.
        if size > HEAD_BYTES:
            file.seek(max(HEAD_BYTES, size - TAIL_BYTES))
            data += b"\n" + file.read(TAIL_BYTES)
    return data.decode("utf-8", errors="replace").replace("\r\n", "\n")
