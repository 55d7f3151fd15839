"""How did it end, and why: from exit codes, events and log tails to a status and one sentence. Pure.

Layer 5. Invariant: what is reported is the cause, never a consequence: when one rank dies, its peers lose the
connection and fail too, but only the rank that went first is named.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dlojz.record import STATUSES, Status
from dlojz.runs.logs import last_line, visible
from dlojz.units import format_seconds

_OOM = re.compile(
    r"MemoryError|OutOfMemoryError|DefaultCPUAllocator: (?:can't|not enough)|CUDA out of memory|Cannot allocate memory"
)
_PORT = re.compile(r"EADDRINUSE|[Aa]ddress already in use")
# What a rank says when its peer has gone (gloo, NCCL, the store): true, and never the cause.
_PEER_GONE = re.compile(
    r"[Cc]onnection (?:was )?(?:closed|reset)|[Bb]roken pipe|[Ss]ocket (?:is )?closed|[Rr]ead error|[Ww]rite error"
    r"|remote process exited|peer (?:has )?(?:closed|exited)|Failed to recv|connectFullMesh|Stop_waiting response"
)

# What C++ and Python print when they abort.
_FATAL = re.compile(r"^(?: *what\(\): .*|Fatal Python error: .*)$", re.MULTILINE)


@dataclass(frozen=True)
class Ending:
    """A status and the sentence that explains it (empty for a run that simply completed)."""

    status: Status
    reason: str = ""


@dataclass(frozen=True)
class Evidence:
    """All that is known about the end of a run.

    Args:
        world_size: number of ranks.
        stopped_by: what the launcher stopped it for, if it did.
        exit_codes: by rank, negative for a signal; only of ranks that ended by themselves, and only non-zero ones.
        ends: status and sentence of the `end` event, by rank.
        steps: finished steps, by rank.
        log_tails: last part of the printed output, by rank.
        kernel_oom: the kernel killed a process for memory while the run lasted.
        launcher: what went wrong in the launcher itself; `vanished` where it is gone.
    """

    world_size: int
    stopped_by: Literal["cancelled", "timeout"] | None = None
    exit_codes: Mapping[int, int] = field(default_factory=dict)
    ends: Mapping[int, tuple[Status, str]] = field(default_factory=dict)
    steps: Mapping[int, int] = field(default_factory=dict)
    log_tails: Mapping[int, str] = field(default_factory=dict)
    kernel_oom: bool = False
    time_limit_s: float | None = None
    launcher: str = ""


def end_of(events: list[dict[str, Any]]) -> tuple[Status, str] | None:
    """Status and sentence of a rank's `end` event, if it wrote one."""
    for event in reversed(events):
        for status in STATUSES:
            if event["event"] == "end" and event.get("status") == status:
                return status, visible(str(event.get("reason") or ""))
    return None


def classify(evidence: Evidence) -> Ending:
    """The status of a run and why, the first rule that applies."""
    for rule in (_completed, _measured, _stopped, _out_of_memory, _killed, _failed, _launcher):
        ending = rule(evidence)
        if ending:
            return ending
    return _leftover(evidence)


def _completed(evidence: Evidence) -> Ending | None:
    ended = [status for status, _ in evidence.ends.values()]
    whole = not evidence.exit_codes and ended == ["completed"] * evidence.world_size
    return Ending("completed") if whole else None


def _measured(evidence: Evidence) -> Ending | None:
    """Divergence and lack of memory are results, which the rank that met them tells itself."""
    for wanted in ("diverged", "oom"):
        for rank, (status, said) in sorted(evidence.ends.items()):
            if status == wanted:
                return Ending(status, _by(rank, said or f"it ended as {status}"))
    return None


def _launcher(evidence: Evidence) -> Ending | None:
    after = _after(_most_steps(evidence))
    if evidence.launcher == "vanished":
        return Ending(
            "failed",
            f"the launcher vanished {after}: it was killed, or the machine stopped; what had been measured is kept.",
        )
    return Ending("failed", f"the launcher failed {after}: {evidence.launcher}") if evidence.launcher else None


def _stopped(evidence: Evidence) -> Ending | None:
    if evidence.stopped_by is None:
        return None
    after = _after(_most_steps(evidence))
    if evidence.stopped_by == "timeout":
        limit = format_seconds(evidence.time_limit_s)
        return Ending("timeout", f"the time limit of {limit} was reached {after}; what had been measured is kept.")
    return Ending("cancelled", f"the run was cancelled {after}; what had been measured is kept.")


def _out_of_memory(evidence: Evidence) -> Ending | None:
    """A rank that printed an allocation failure and fell; or that the kernel killed for memory."""
    for rank, code in sorted(evidence.exit_codes.items()):
        said = last_line(evidence.log_tails.get(rank, ""))
        if rank not in evidence.ends and code > 0 and _OOM.search(said):
            return Ending("oom", f"rank {rank} ran out of memory {_after(evidence.steps.get(rank, 0))}: {said}")
        if code == -signal.SIGKILL and evidence.kernel_oom:
            return Ending(
                "oom",
                f"rank {rank} was killed by the system {_after(evidence.steps.get(rank, 0))} because "
                "the machine ran out of memory.",
            )
    return None


def _killed(evidence: Evidence) -> Ending | None:
    """A rank that a signal ended; SIGKILL first, since it is never a consequence."""
    for rank, code in sorted(evidence.exit_codes.items(), key=lambda item: (item[1] != -signal.SIGKILL, item[0])):
        if code < 0 and not _follows(evidence, rank):
            return Ending("failed", _signalled(evidence, rank))
    return None


def _follows(evidence: Evidence, rank: int) -> bool:
    """Whether the signal that ended a rank came of the loss of its peers."""
    code = evidence.exit_codes[rank]
    if code == -signal.SIGTERM:  # what the launcher sends to the peers of a rank that failed
        return True
    status, said = evidence.ends.get(rank, (None, ""))
    lost = status == "cancelled" or _PEER_GONE.search(said) or _PEER_GONE.search(evidence.log_tails.get(rank, ""))
    return code == -signal.SIGABRT and bool(lost)  # gloo's threads may abort when they are torn down


def _signalled(evidence: Evidence, rank: int) -> str:
    number = -evidence.exit_codes[rank]
    name = signal.Signals(number).name if number in set(signal.Signals) else "unknown"
    words = f"rank {rank} was killed by signal {number} ({name}) {_after(evidence.steps.get(rank, 0))}"
    if number == signal.SIGKILL:
        return f"{words}: if nobody stopped it, the machine ran out of memory."
    said = _FATAL.findall(evidence.log_tails.get(rank, ""))
    return f"{words}: {last_line(said[-1])}" if said else f"{words}."


def _failed(evidence: Evidence) -> Ending | None:
    """The first rank whose own words are a cause and not the loss of a peer."""
    for rank in range(evidence.world_size):
        status, said = evidence.ends.get(rank, (None, ""))
        code = evidence.exit_codes.get(rank, 0)
        if status is None and code > 0:
            said = last_line(evidence.log_tails.get(rank, ""))
            words = _exited(evidence, rank)
        elif status == "failed":
            words = _by(rank, said or "it failed without saying why")
        else:
            continue
        if _PORT.search(said):
            return Ending(
                "failed",
                f"rank {rank} could not open its network port, because another program uses it "
                "(EADDRINUSE): run it again, a free port is chosen each time.",
            )
        if not _PEER_GONE.search(said):
            return Ending("failed", words)
    return None


def _leftover(evidence: Evidence) -> Ending:
    """No rank named a cause: say what there is, the ranks that lost their peers included."""
    for rank, (status, said) in sorted(evidence.ends.items()):
        if status != "completed":
            return Ending(status, _by(rank, said or f"it ended as {status}"))
    for rank, code in sorted(evidence.exit_codes.items()):
        return Ending("failed", _exited(evidence, rank) if code > 0 else _signalled(evidence, rank))
    silent = next((rank for rank in range(evidence.world_size) if rank not in evidence.ends), 0)
    return Ending("failed", f"rank {silent} ended {_after(evidence.steps.get(silent, 0))} without saying how.")


def _exited(evidence: Evidence, rank: int) -> str:
    said = last_line(evidence.log_tails.get(rank, ""))
    after = _after(evidence.steps.get(rank, 0))
    return f"rank {rank} ended with exit code {evidence.exit_codes[rank]} {after}: {said}".rstrip(": ")


def _by(rank: int, said: str) -> str:
    return said if "rank" in said else f"rank {rank}: {said}"


def _after(steps: int) -> str:
    return f"after step {steps}" if steps else "before its first step was finished"


def _most_steps(evidence: Evidence) -> int:
    return max(evidence.steps.values(), default=0)
