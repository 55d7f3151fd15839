"""Turn the profiler's events of each rank into activities, on one clock: computing, communication, pipeline actions.

**Activities.** On a GPU the kernels say when a rank computes, and NCCL's kernels when it communicates; on the CPU the
operators of torch do, but for those that only post or await a message, and the backend's own marks (`gloo:all_reduce`).
Communication is exposed where its rank computes nothing meanwhile, and hidden elsewhere.

**Passes.** An operator of the forward and its node in the backward carry the same sequence number. Forwards between
which a message is posted, or a backward runs, are of different micro-batches; a backward is of the micro-batch whose
numbers it has. On a GPU a pass is what its operators launch.

**Clocks.** Each host has its own clock. A collective that no rank can leave before all have entered it ends on all of
them at nearly one moment: the median difference of the ends is the difference of two clocks. Where there is none, a
message in each direction bounds it, as NTP does: half the difference of the shortest ways (Mills 1991, "Internet time
synchronization: the network time protocol"). A difference that its own uncertainty covers is taken as none.

**Stragglers.** A rank that enters such a collective makes the others wait until it has come.
"""

from __future__ import annotations

import heapq
import math
import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from dlojz.base.errors import LabError
from dlojz.base.language import format_seconds, say
from dlojz.base.table import visible
from dlojz.results.footprint import Collective
from dlojz.results.profiler_trace import MOST_RANKS, TraceFile, phrase, rank_of
from dlojz.results.record import Span

Intervals = NDArray[np.float64]
"""Start and end per row, in seconds: sorted, without overlap."""

DEVICE, HOST = ("kernel", "gpu_memcpy", "gpu_memset"), "cpu_op"
LAUNCHES = ("cuda_runtime", "cuda_driver", "xpu_runtime", "xpu_driver", "privateuse1_runtime", "privateuse1_driver")
"""Calls that launch kernels; ROCm's (`hipLaunchKernel`) are `cuda_runtime` too (Kineto, `ActivityType.cpp`)."""
_OLDER = {"Kernel": "kernel", "Memcpy": "gpu_memcpy", "Memset": "gpu_memset", "Operator": HOST, "Runtime": LAUNCHES[0]}
"""Categories as Kineto wrote them up to torch 1.12."""
MARKS = ("user_annotation", "gpu_user_annotation")
POSTS = ("c10d", "_c10d_functional", "record_param_comms", "gloo:", "nccl:", "mpi:", "ucc:")
"""Operators and marks that post or await a message: no computation."""
BACKENDS = ("gloo:", "nccl:", "mpi:", "ucc:", "nccldevkernel_", "ncclkernel_", "ncclsymkdevkernel_")
COMMUNICATES = re.compile(r"^nccl|nvshmem|multimem_|_all_?reduce_kernel|cross_device_reduce", re.IGNORECASE)
"""Kernels that communicate: NCCL's and RCCL's, torch's symmetric memory, vLLM's own all-reduce."""
OF_BACKWARD = "autograd::engine::evaluate_function"
ACTION = re.compile(r"PP:(\S+)|(Forward|Backward) (\d+)")
OPTIMIZER = re.compile(r"Optimizer\.step#")
TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Collectives that nobody leaves before all have entered."""
_COLLECTIVES = {name.replace("_", ""): name for name in get_args(Collective)}
_POSTED = ("c10d::send", "c10d::recv_")
_NUMBER, _NODE = "Sequence number", "Fwd thread id"
LONGEST_MARK = 64
DRAWN = 2000
"""Parts of the time that a drawing can tell apart."""
MOST_KEPT = 2_000_000
"""Marks and messages that are kept of one rank."""


class Exchange(NamedTuple):
    """Communication of one rank: a collective, or a message; times in seconds."""

    kind: str
    start_s: float
    end_s: float
    group: str = ""
    sequence: int | None = None


class TracedMark(NamedTuple):
    """Stretch that a program has named: an action of a pipeline, an optimizer step; times in seconds."""

    name: str
    start_s: float
    end_s: float
    lane: str
    on_device: bool = False


class TracedPass(NamedTuple):
    """Forward or backward of one micro-batch, counted in the order of the forwards; times in seconds."""

    backward: bool
    micro_batch: int
    start_s: float
    end_s: float


class TracedMessage(NamedTuple):
    """Message between two ranks: when it was ready to leave and when it had arrived, each on its rank's own clock."""

    sender: int
    receiver: int
    sent_s: float
    arrived_s: float


@dataclass(frozen=True)
class RankActivities:
    """What one rank did, in seconds of one clock.

    Attributes:
        world_size: ranks that took part; None where the trace does not say.
        base_ns: what the clock counts from.
        on_device: whether kernels say when it computed.
        computing, backward, optimizing: when it did.
        exchanges: in order of their start.
        marks: pipeline actions, as the program names them.
        passes: of a rank that posts messages, in order of their start.
        first_s, last_s: first start and last end of all that is kept.
    """

    rank: int
    world_size: int | None
    base_ns: int
    on_device: bool
    computing: Intervals
    backward: Intervals
    optimizing: Intervals
    exchanges: tuple[Exchange, ...]
    marks: tuple[TracedMark, ...]
    passes: tuple[TracedPass, ...]

    @property
    def first_s(self) -> float:
        """First start."""
        return min(self._edges(0), default=0.0)

    @property
    def last_s(self) -> float:
        """Last end."""
        return max(self._edges(1), default=0.0)

    def _edges(self, side: int) -> list[float]:
        interval_arrays = (self.computing, self.optimizing)
        # Rows are in order and do not overlap: the first starts first, the last ends last.
        edges = [float(intervals[0 if side == 0 else -1, side]) for intervals in interval_arrays if len(intervals)]
        edges += [(exchange.start_s, exchange.end_s)[side] for exchange in self.exchanges]
        return edges + [(mark.start_s, mark.end_s)[side] for mark in self.marks]

    def shifted(self, by_s: float) -> RankActivities:
        """Copy it with all times moved."""

        def moved(activities: Iterable[Any]) -> tuple[Any, ...]:
            return tuple(
                activity._replace(start_s=activity.start_s + by_s, end_s=activity.end_s + by_s)
                for activity in activities
            )

        return replace(
            self,
            computing=self.computing + by_s,
            backward=self.backward + by_s,
            optimizing=self.optimizing + by_s,
            exchanges=moved(self.exchanges),
            marks=moved(self.marks),
            passes=moved(self.passes),
        )

    def clipped(self, start_s: float, end_s: float) -> RankActivities:
        """Copy what lies between two moments; what crosses one is cut."""

        def cut(activities: Iterable[Any]) -> tuple[Any, ...]:
            inside = (a for a in activities if a.end_s > start_s and a.start_s < end_s)
            return tuple(a._replace(start_s=max(a.start_s, start_s), end_s=min(a.end_s, end_s)) for a in inside)

        computing, backward, optimizing = (
            # Rows that lie outside shrink to no length, which `merged` leaves out.
            merged(np.clip(rows, start_s, end_s))
            for rows in (self.computing, self.backward, self.optimizing)
        )
        return replace(
            self,
            computing=computing,
            backward=backward,
            optimizing=optimizing,
            exchanges=cut(self.exchanges),
            marks=cut(self.marks),
            passes=cut(self.passes),
        )

    @property
    def counted(self) -> list[Exchange]:
        """What counts as communication; on the host the mark of a send ends where it is awaited, so sends do not."""
        return [exchange for exchange in self.exchanges if self.on_device or exchange.kind != "send"]

    @property
    def communicating(self) -> Intervals:
        """When it communicates."""
        return merged((exchange.start_s, exchange.end_s) for exchange in self.counted)

    @property
    def exposed(self) -> Intervals:
        """When it communicates and computes nothing."""
        return without(self.communicating, self.computing)


def merged(pairs: Iterable[tuple[float, float]] | Intervals) -> Intervals:
    """Unite intervals that overlap."""
    rows = np.asarray(pairs if isinstance(pairs, np.ndarray) else list(pairs), np.float64).reshape(-1, 2)
    # (n, 2); rows without length cover nothing.
    rows = rows[rows[:, 1] > rows[:, 0]]
    if not len(rows):
        return rows
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    # `ends`: the latest end up to each row. A row that starts after that of the row before opens an interval.
    ends = np.maximum.accumulate(rows[:, 1])
    fresh = np.concatenate([[True], rows[1:, 0] > ends[:-1]])
    last_rows = np.concatenate([np.flatnonzero(fresh)[1:] - 1, [len(rows) - 1]])
    return np.stack([rows[fresh, 0], ends[last_rows]], axis=1)


def without(intervals: Intervals, holes: Intervals) -> Intervals:
    """Cut the others out of intervals; both without overlap, in order."""
    times = np.unique(np.concatenate([intervals.ravel(), holes.ravel()]))
    # Between two times that follow each other, a set of intervals holds either all or nothing.
    # A time lies within where more intervals have started than ended up to it.
    in_intervals, in_holes = (
        np.searchsorted(rows[:, 0], times[:-1], side="right") > np.searchsorted(rows[:, 1], times[:-1], side="right")
        for rows in (intervals, holes)
    )
    mask = in_intervals & ~in_holes
    return merged(np.stack([times[:-1][mask], times[1:][mask]], axis=1))


def total(intervals: Intervals) -> float:
    """Seconds of intervals without overlap."""
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def activities_of(trace: TraceFile, listener: Listener | None = None) -> RankActivities:
    """Read the trace of one rank.

    Args:
        listener: hears of each event that has a time; the trace is of one rank alone, which may be unknown (−1).

    Raises:
        LabError: if it is of another tool, has no events, names no rank, or keeps too much.
    """
    collector = _Kept(listener)
    for event in trace.events():
        collector.add(event)
        if collector.count > MOST_KEPT:
            raise phrase.refused("too many marks", trace=trace, most=MOST_KEPT)
    if not collector.known:
        raise _of_nothing(trace)
    if wrong := collector.wrong_time():
        raise phrase.refused("impossible time", trace=trace, wrong=wrong)
    rank = rank_of(trace, by_any_number=listener is None)
    if rank is None and listener is not None:
        rank = -1
    if rank is None:
        raise phrase.refused("no rank", trace=trace)
    distributed_info = trace.head.get("distributedInfo")
    size = distributed_info.get("world_size") if isinstance(distributed_info, dict) else None
    base = trace.head.get("baseTimeNanoseconds")
    return collector.activities(
        rank,
        size if isinstance(size, int) and 0 < size <= MOST_RANKS else None,
        base if isinstance(base, int) and abs(base) < 1 << 63 else 0,
    )


def _of_nothing(trace: TraceFile) -> LabError:
    if not trace.count:
        return phrase.refused("no events", trace=trace)
    if "schemaVersion" in trace.head or "distributedInfo" in trace.head:
        return phrase.refused("no operators", trace=trace)
    return phrase.refused("trace of another tool", trace=trace)


Listener = Callable[[str, str, float, float, Mapping[str, Any]], None]
"""What is called with category, name, start and end in seconds, and the event."""

_FEW, _FAR, _FAR_S = 4, 100.0, 60.0
"""Events of which a spread is known; times the spread of three quarters of them, and seconds, from which on an event is
no part of the profile. A clock itself may count from anywhere, also below 0."""


def _seconds(microseconds: object) -> float:
    """Convert a time of an event; NaN where it is no number."""
    if isinstance(microseconds, bool) or not isinstance(microseconds, int | float):
        return math.nan
    try:
        return microseconds * 1e-6
    except OverflowError:
        return math.inf


class _Kept:
    """What is kept of a rank's events while they are read: edges of intervals, messages, marks, numbers of autograd."""

    def __init__(self, listener: Listener | None = None) -> None:
        self.listener = listener
        self.edges: dict[str, array[float]] = defaultdict(lambda: array("d"))
        self.forwards: dict[str, array[float]] = defaultdict(lambda: array("d"))
        self.nodes, self.posts = array("d"), array("d")
        self.launches, self.kernels = array("d"), array("d")
        self.exchanges: list[Exchange] = []
        self.device_exchanges: list[Exchange] = []
        self.marks: list[TracedMark] = []
        self.known = 0
        self.begins, self.ends = array("d"), array("d")
        self.earliest, self.latest = (math.inf, ""), (-math.inf, "")

    @property
    def count(self) -> int:
        """Messages and marks so far."""
        return len(self.exchanges) + len(self.device_exchanges) + len(self.marks)

    def add(self, event: Mapping[str, Any]) -> None:
        """Keep what matters of an event."""
        kind, name, start, lasts = (event.get(key) for key in ("cat", "name", "ts", "dur"))
        # X: a complete event, with start (`ts`) and duration (`dur`) in microseconds.
        if event.get("ph") != "X" or not isinstance(name, str) or not isinstance(kind, str):
            return
        kind = _OLDER.get(kind, kind)
        if kind not in {*DEVICE, *LAUNCHES, *MARKS, HOST}:
            return
        begin, end = _seconds(start), _seconds(start) + _seconds(lasts)
        if not (math.isfinite(begin) and math.isfinite(end)) or end < begin:
            return
        self.begins.append(begin)
        self.ends.append(end)
        if self.listener is not None:
            self.listener(kind, name, begin, end, event)
        self.earliest, self.latest = min(self.earliest, (begin, name)), max(self.latest, (end, name))
        if kind in DEVICE:
            self._kernel(event, name, begin, end)
        elif kind in LAUNCHES:
            # A launch and its kernel have the same correlation number.
            self.launches.extend((whole_number(event, "correlation"), begin))
        elif kind in MARKS:
            self._mark(event, kind, name, begin, end)
        elif kind == HOST:
            self._operator(event, name, begin, end)

    def wrong_time(self) -> str:
        """Name an event that is far from all the others in time; empty where none is, or there are few."""
        if len(self.begins) < _FEW:
            return ""
        middle_s = float(np.median(self.begins))
        distances_s = np.abs(np.asarray(self.begins) - middle_s)
        far_s = _FAR * float(np.quantile(distances_s, 0.75)) + _FAR_S
        for (moment_s, name), away_s in (
            (self.earliest, middle_s - self.earliest[0]),
            (self.latest, self.latest[0] - middle_s),
        ):
            if away_s > far_s:
                words = say(en="away from the others", fr="des autres")
                return f"{visible(name)}, {moment_s * 1e6:.0f} µs, {format_seconds(away_s)} {words}"
        return ""

    def _kernel(self, event: Mapping[str, Any], name: str, begin: float, end: float) -> None:
        self.known += 1
        if COMMUNICATES.search(name):
            self.device_exchanges.append(_exchange(event, name, begin, end))
        else:
            self.kernels.extend((whole_number(event, "correlation"), begin, end))

    def _mark(self, event: Mapping[str, Any], kind: str, name: str, begin: float, end: float) -> None:
        self.known += 1
        if name.lower().startswith(BACKENDS):
            # The device has a mark of its own for the same call: it counts once.
            if kind == "user_annotation":
                self.exchanges.append(_exchange(event, name, begin, end))
        elif len(name) <= LONGEST_MARK and ACTION.fullmatch(name):
            self.marks.append(TracedMark(name, begin, end, _lane(event), kind != "user_annotation"))
        elif OPTIMIZER.match(name):
            self.edges[f"optimizer {kind}"].extend((begin, end))

    def _operator(self, event: Mapping[str, Any], name: str, begin: float, end: float) -> None:
        self.known += 1
        number, of_node = whole_number(event, _NUMBER), whole_number(event, _NODE)
        if name.lower().startswith(BACKENDS):
            self.exchanges.append(_exchange(event, name, begin, end))
        elif name.startswith(POSTS):
            self.edges["post"].extend((begin, end))
            if name in _POSTED:
                self.posts.append(begin)
        elif name.startswith(OF_BACKWARD):
            self.edges["backward"].extend((begin, end))
            if not name.endswith("GraphRoot"):  # made by the backward itself
                self.nodes.extend((number, begin, end))
        elif of_node <= 0:  # a node may wait in a hook: what it computes are operators within it
            self.edges["operator"].extend((begin, end))
            # A forward's operator has a sequence number and no thread of a forward (0).
            if number >= 0 and of_node == 0:
                self.forwards[_lane(event)].extend((number, begin))

    def activities(self, rank: int, world_size: int | None, base_ns: int) -> RankActivities:
        """All of the rank; on a device, what its kernels say."""
        kernels, backward = self._kernels(), self._merged("backward")
        on_device = bool(len(kernels))
        # NCCL's kernels where there are any: on the host a call returns before its kernel has run.
        exchanges = self.device_exchanges if on_device and self.device_exchanges else self.exchanges
        # The marks of the device where there are any, else those of the host.
        on_host = not any(mark.on_device for mark in self.marks)
        passes = self._passes(backward)
        if on_device:
            # Columns: launch, start, end. A kernel whose launch lies in the backward is of the backward.
            computing, of_backward = merged(kernels[:, 1:]), merged(kernels[_inside(kernels[:, 0], backward), 1:])
        else:
            computing = without(self._merged("operator"), self._merged("post"))
            # A less (A less B): their intersection.
            of_backward = without(computing, without(computing, backward))
        return RankActivities(
            rank,
            world_size,
            base_ns,
            on_device,
            computing,
            of_backward,
            # MARKS[False] is the host's, MARKS[True] the device's.
            self._merged(f"optimizer {MARKS[on_device]}"),
            tuple(sorted(exchanges, key=lambda exchange: exchange.start_s)),
            tuple(sorted((mark for mark in self.marks if mark.on_device != on_host), key=lambda mark: mark.start_s)),
            _launched(passes, kernels) if on_device else passes,
        )

    def _merged(self, name: str) -> Intervals:
        return merged(rows_of(self.edges[name], 2))

    def _kernels(self) -> NDArray[np.float64]:
        """Launch, start and end of each kernel, in the order of the launches; one without a launch has NaN."""
        # (kernels, 3): correlation, start, end; (launches, 2): correlation, moment.
        kernels = rows_of(self.kernels, 3)
        kernels[:, 0] = launch_moments(kernels[:, 0], rows_of(self.launches, 2))
        return kernels[np.argsort(kernels[:, 0], kind="stable")]

    def _passes(self, backward: Intervals) -> tuple[TracedPass, ...]:
        """Forwards and backwards of the micro-batches of a rank that posts messages, where they run on the host."""
        if not self.posts:
            return ()
        # The thread with most numbered operators runs the forwards.
        lane = max(self.forwards, key=lambda name: len(self.forwards[name]), default="")
        forwards, nodes = rows_of(self.forwards[lane], 2), rows_of(self.nodes, 3)
        forwards = forwards[~_inside(forwards[:, 1], backward)]  # what is recomputed there is no forward
        forwards = forwards[np.lexsort((forwards[:, 1], forwards[:, 0]))]
        # Several operators see a number before the one that makes its node: the last.
        forwards = forwards[np.diff(forwards[:, 0], append=np.inf) > 0]
        nodes = nodes[np.argsort(nodes[:, 1], kind="stable")]
        forward_index = np.searchsorted(forwards[:, 0], nodes[:, 0])
        has_forward = forward_index < len(forwards)
        has_forward[has_forward] = forwards[forward_index[has_forward], 0] == nodes[has_forward, 0]
        if not has_forward.any():
            return ()
        made_s = np.full(len(nodes), np.nan)
        made_s[has_forward] = forwards[forward_index[has_forward], 1]
        # Moments at which one micro-batch's forward has surely ended.
        cuts = np.sort(np.concatenate([np.asarray(self.posts), nodes[has_forward, 1]]))
        stretch = np.searchsorted(cuts, made_s[has_forward])
        micro_batch = np.full(len(nodes), -1)
        # Stretches between cuts in which forwards lie, numbered 0, 1, … in the order of time.
        micro_batch[has_forward] = np.unique(stretch, return_inverse=True)[1]
        unnumbered = nodes[:, 0] < 0  # gradients are accumulated in the backward that made them
        # For each node the index of the last numbered one before it, or its own.
        before = np.maximum.accumulate(np.where(unnumbered, 0, np.arange(len(nodes))))
        micro_batch = micro_batch[before]
        operators, passes = self._merged("operator"), []
        order = np.argsort(micro_batch, kind="stable")
        # −1 sorts first: nodes whose forward is not known, which [1:] leaves out.
        firsts = np.searchsorted(micro_batch[order], np.arange(int(micro_batch.max()) + 1))
        for number, node_indices in enumerate(np.split(order, firsts)[1:]):
            bounds_s = np.nanmin(made_s[node_indices]), np.nanmax(made_s[node_indices])
            # The operators that lie around the first and the last forward number of the micro-batch.
            first_operator, last_operator = np.searchsorted(operators[:, 0], bounds_s, side="right") - 1
            passes.append(
                TracedPass(False, number, float(operators[first_operator, 0]), float(operators[last_operator, 1]))
            )
            passes.append(
                TracedPass(True, number, float(nodes[node_indices, 1].min()), float(nodes[node_indices, 2].max()))
            )
        return tuple(sorted(passes, key=lambda traced_pass: traced_pass.start_s))


def rows_of(numbers: array[float], columns: int) -> NDArray[np.float64]:
    """Copy numbers into a table of so many columns."""
    return np.frombuffer(numbers, np.float64).reshape(-1, columns).copy()


def launch_moments(correlations: NDArray[np.float64], launches: NDArray[np.float64]) -> NDArray[np.float64]:
    """Find when each kernel was launched, by their common correlation number; NaN where that is not in the trace.

    Args:
        correlations: of the kernels; negative where a kernel has none.
        launches: rows of correlation and moment.
    """
    launches = launches[np.argsort(launches[:, 0], kind="stable")]
    launch_index = np.searchsorted(launches[:, 0], correlations)
    has_launch = (launch_index < len(launches)) & (correlations >= 0)
    # `searchsorted` tells where a number would stand; it is there only if the one that stands there is equal.
    has_launch[has_launch] = launches[launch_index[has_launch], 0] == correlations[has_launch]
    moments_s = np.full(len(correlations), np.nan)
    moments_s[has_launch] = launches[launch_index[has_launch], 1]
    return moments_s


def whole_number(event: Mapping[str, Any], key: str) -> int:
    """Read a natural number among an event's arguments, exact as a float; -1 where there is none."""
    arguments = event.get("args")
    number = arguments.get(key) if isinstance(arguments, dict) else None
    return number if isinstance(number, int) and 0 <= number < 1 << 53 else -1


def _inside(moments: NDArray[np.float64], intervals: Intervals) -> NDArray[np.bool_]:
    """Which moments lie in intervals that are sorted and do not overlap; NaN in none."""
    interval_index = np.searchsorted(intervals[:, 0], moments, side="right") - 1
    inside = interval_index >= 0
    inside[inside] = moments[inside] <= intervals[interval_index[inside], 1]
    return inside


def _launched(passes: Sequence[TracedPass], kernels: NDArray[np.float64]) -> tuple[TracedPass, ...]:
    """Move passes from the host to the device: from the first kernel that they launch to the end of the last."""
    device_passes = []
    for host_pass in passes:
        # The rows of the kernels that were launched within the pass.
        start_row, end_row = np.searchsorted(kernels[:, 0], (host_pass.start_s, host_pass.end_s))
        if start_row < end_row:
            times = float(kernels[start_row:end_row, 1].min()), float(kernels[start_row:end_row, 2].max())
            device_passes.append(host_pass._replace(start_s=times[0], end_s=times[1]))
    return tuple(sorted(device_passes, key=lambda device_pass: device_pass.start_s))


def _lane(event: Mapping[str, Any]) -> str:
    return f"{event.get('pid')}/{event.get('tid')}"


def _exchange(event: Mapping[str, Any], name: str, begin: float, end: float) -> Exchange:
    raw_arguments = event.get("args")
    arguments: Mapping[str, Any] = raw_arguments if isinstance(raw_arguments, dict) else {}
    # `nccl:all_reduce` and `ncclDevKernel_AllReduce_Sum_f32(…)` both become `allreduce`.
    word = str(arguments.get("Collective name") or name).lower()
    for prefix in BACKENDS:
        word = word.removeprefix(prefix)
    plain = re.sub(r"[^a-z]", "", word.split("(")[0].split(" ")[0])
    kind = next(
        (collective for letters, collective in _COLLECTIVES.items() if plain.lstrip("_").startswith(letters)), plain
    )
    sequence = arguments.get("Seq")
    # Halves of a group that was split have one name, but not the same ranks.
    group = f"{arguments.get('Process Group Name', '')} {arguments.get('Process Group Ranks', '')}"
    return Exchange(kind, begin, end, group, sequence if isinstance(sequence, int) else None)


@dataclass(frozen=True)
class AlignedRanks:
    """Ranks on one clock, which counts seconds from the first activity.

    Attributes:
        shifts_s: how far the clock of each rank was moved, its base aside.
        uncertain_s: how well that is known; infinite where no common collective or message ties the rank to others.
    """

    ranks: tuple[RankActivities, ...]
    shifts_s: tuple[float, ...]
    uncertain_s: tuple[float, ...]

    @property
    def length_s(self) -> float:
        """From the first activity of all to the last."""
        return max(log.last_s for log in self.ranks)


def check_ranks(ranks: Sequence[RankActivities], names: Sequence[str]) -> None:
    """Refuse traces that cannot be laid beside each other.

    Raises:
        LabError: if there is one rank twice, or ranks of runs of different sizes.
    """
    by_rank: dict[int, str] = {}
    for log, name in zip(ranks, names, strict=True):
        if log.rank in by_rank:
            raise phrase.refused("two traces of a rank", log=log, first_name=by_rank[log.rank], name=name)
        by_rank[log.rank] = name
    sizes = {log.world_size: name for log, name in zip(ranks, names, strict=True) if log.world_size}
    if len(sizes) > 1:
        (size, name), (other_size, other_name) = list(sizes.items())[:2]
        raise phrase.refused("traces of two runs", name=name, size=size, other_name=other_name, other_size=other_size)


def matched_collectives(ranks: Sequence[RankActivities]) -> list[dict[int, Exchange]]:
    """Match the collectives that several ranks took part in: by sequence number, else by their order.

    Without numbers, a kind whose count differs between ranks that have it is left out.
    """
    numbered: dict[tuple[str, str, int], dict[int, Exchange]] = defaultdict(dict)
    ordered: dict[tuple[str, str], dict[int, list[Exchange]]] = defaultdict(lambda: defaultdict(list))
    for log in ranks:
        for exchange in log.exchanges:
            if exchange.kind not in TOGETHER:
                continue
            if exchange.sequence is not None:
                numbered[exchange.kind, exchange.group, exchange.sequence][log.rank] = exchange
            else:
                ordered[exchange.kind, exchange.group][log.rank].append(exchange)
    matches = list(numbered.values())
    for by_rank in ordered.values():
        if len({len(exchanges) for exchanges in by_rank.values()}) == 1:
            members = list(by_rank)
            # The n-th call of each rank.
            matches += [
                dict(zip(members, exchanges, strict=True))
                for exchanges in zip(*(by_rank[member] for member in members), strict=True)
            ]
    return sorted(
        (match for match in matches if len(match) > 1),
        key=lambda match: min(exchange.start_s for exchange in match.values()),
    )


class _Tie(NamedTuple):
    """The clock of one rank minus that of another, and how uncertain it is."""

    difference_s: float
    uncertain_s: float


def aligned(ranks: Sequence[RankActivities], messages: Iterable[TracedMessage] = ()) -> AlignedRanks:
    """Put all ranks on the clock of the first, which then counts from the first activity.

    Args:
        ranks: at least one, each on its own clock.
        messages: times on the clocks of their ranks, for ranks that share no collective.

    Raises:
        LabError: if nothing ties a rank to the others, and it was not traced while they were.
    """
    ranks = sorted(ranks, key=lambda log: log.rank)
    # Whole nanoseconds are subtracted before they become seconds: as floats they would lose digits.
    base = ranks[0].base_ns
    based = {log.rank: (log.base_ns - base) * 1e-9 for log in ranks}
    ties = _ties(ranks, based, messages)
    reached: dict[int, _Tie] = {}
    waiting = [(0.0, ranks[0].rank, 0.0)]
    # Dijkstra from the first rank: each rank by the path whose uncertainties add up to the least.
    while waiting:
        uncertain, rank, difference = heapq.heappop(waiting)
        if rank in reached:
            continue
        reached[rank] = _Tie(difference, uncertain)
        for (from_rank, to_rank), tie in ties.items():
            if from_rank == rank and to_rank not in reached:
                heapq.heappush(waiting, (uncertain + tie.uncertain_s, to_rank, difference + tie.difference_s))
    shifts, unsure = [], []
    for log in ranks:
        tie = reached.get(log.rank, _Tie(0.0, math.inf))
        shifts.append(0.0 if abs(tie.difference_s) <= tie.uncertain_s else -tie.difference_s)
        unsure.append(tie.uncertain_s)
    shifted_ranks = [log.shifted(based[log.rank] + shift) for log, shift in zip(ranks, shifts, strict=True)]
    for log, doubt in zip(shifted_ranks, unsure, strict=True):
        peers = [peer for peer in shifted_ranks if peer is not log]
        if math.isinf(doubt) and all(log.last_s < peer.first_s or peer.last_s < log.first_s for peer in peers):
            raise phrase.refused("not traced at the same time", log=log)
    start = min(log.first_s for log in shifted_ranks)
    return AlignedRanks(tuple(log.shifted(-start) for log in shifted_ranks), tuple(shifts), tuple(unsure))


def _ties(
    ranks: Sequence[RankActivities], based: Mapping[int, float], messages: Iterable[TracedMessage]
) -> dict[tuple[int, int], _Tie]:
    """For pairs of ranks, by how much the clock of the second is ahead of the first's."""
    differences: dict[tuple[int, int], list[float]] = defaultdict(list)
    for members in matched_collectives(ranks):
        reference, *peers = sorted(members)
        for peer in peers:
            # All leave at one moment, so that the ends differ by the clocks.
            ends = (members[peer].end_s + based[peer]) - (members[reference].end_s + based[reference])
            differences[reference, peer].append(ends)
    ties: dict[tuple[int, int], _Tie] = {}
    for pair, end_differences_s in differences.items():
        # Median and median deviation from it: single late ends do not count.
        middle = float(np.median(end_differences_s))
        spread = float(np.median(np.abs(np.asarray(end_differences_s) - middle)))
        ties[pair] = _Tie(middle, spread)
    shortest_s: dict[tuple[int, int], float] = {}
    for sender, receiver, sent_s, arrived_s in messages:
        # Time on the way + difference of the clocks; the shortest has waited least.
        delay_s = (arrived_s + based[receiver]) - (sent_s + based[sender])
        shortest_s[sender, receiver] = min(delay_s, shortest_s.get((sender, receiver), math.inf))
    for rank_a, rank_b in combinations(sorted(based), 2):
        if (rank_a, rank_b) in shortest_s and (rank_b, rank_a) in shortest_s:
            forth_s, back_s = shortest_s[rank_a, rank_b], shortest_s[rank_b, rank_a]
            # With t on the way and clocks d apart, one direction shows t + d, the other t − d.
            tie = _Tie((forth_s - back_s) / 2, abs(forth_s + back_s) / 2)
            if (rank_a, rank_b) not in ties or tie.uncertain_s < ties[rank_a, rank_b].uncertain_s:
                ties[rank_a, rank_b] = tie
    return ties | {(rank_b, rank_a): _Tie(-tie.difference_s, tie.uncertain_s) for (rank_a, rank_b), tie in ties.items()}


def spans_of(aligned_ranks: AlignedRanks) -> tuple[Span, ...]:
    """List what each rank does as spans of one step, for a drawing: what lies closer than it can show is joined."""
    near_s = aligned_ranks.length_s / DRAWN
    spans = []
    for log in aligned_ranks.ranks:
        busy = log.communicating
        forward = without(without(log.computing, log.backward), log.optimizing)
        phases = {
            "forward" if len(log.backward) else "compute": forward,
            "backward": log.backward,
            "optimizer": log.optimizing,
            "communication": busy,
            "wait": log.exposed,
        }
        spans += [
            # Unchecked: the rank is −1 where the trace does not name it, and no record has that.
            Span.model_construct(rank=log.rank, step=0, phase=phase, start_s=start, end_s=end)
            for phase, intervals in phases.items()
            for start, end in _joined(intervals, near_s).tolist()
        ]
    return tuple(spans)


def _joined(intervals: Intervals, near_s: float) -> Intervals:
    """Unite intervals between which there is next to nothing."""
    # Longer by `near_s`, what lies closer overlaps and is united; then the ends are moved back.
    widened = merged(intervals + np.array([0.0, near_s]))
    return widened - np.array([0.0, near_s]) if len(widened) else widened


class CollectiveShare(NamedTuple):
    """Communication of one kind, mean of the ranks that have it: how often, how long, how much of that exposed."""

    kind: str
    calls: float
    seconds: float
    exposed_s: float


def collectives_of(aligned_ranks: AlignedRanks) -> tuple[CollectiveShare, ...]:
    """Sum communication by kind, what is exposed most first; on the host the mark of a send says nothing."""
    rows_by_kind: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
    for log in aligned_ranks.ranks:
        of_kind: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for exchange in log.counted:
            of_kind[exchange.kind].append((exchange.start_s, exchange.end_s))
        for kind, times in of_kind.items():
            busy = merged(times)
            rows_by_kind[kind].append((len(times), total(busy), total(without(busy, log.computing))))
    # (ranks, 3) → (3,): mean calls, seconds and exposed seconds.
    shares = [CollectiveShare(kind, *np.mean(rows, axis=0).tolist()) for kind, rows in rows_by_kind.items()]
    return tuple(sorted(shares, key=lambda share: -share.exposed_s))


class RankShares(NamedTuple):
    """Seconds of one rank, within the time from the first activity of all ranks to the last.

    `exposed_s` is communication beside which nothing is computed, `waited_s` the part of it spent on waiting for ranks
    that had not entered a collective yet; `idle_s` is neither computing nor communication.
    """

    rank: int
    computing_s: float
    hidden_s: float
    exposed_s: float
    waited_s: float
    idle_s: float


class Straggler(NamedTuple):
    """A rank that others wait for at collectives: how often it was the last, and what they waited for it.

    `waited_s` is the mean over the ranks that waited, summed over the collectives; `late_s` the median of how long
    after the rank before it it came.
    """

    rank: int
    last: int
    collectives: int
    waited_s: float
    late_s: float


def shares_of(aligned_ranks: AlignedRanks) -> tuple[RankShares, ...]:
    """Divide the time of each rank into computing, communication and waiting."""
    waits: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for members in matched_collectives(aligned_ranks.ranks):
        last_entry_s = max(exchange.start_s for exchange in members.values())
        for rank, exchange in members.items():
            # It waits until the last rank has entered, at most to its own end.
            waits[rank].append((exchange.start_s, min(exchange.end_s, last_entry_s)))
    shares = []
    for log in aligned_ranks.ranks:
        busy = log.communicating
        exposed = log.exposed
        waited = without(merged(waits[log.rank]), log.computing)
        computing = total(log.computing)
        shares.append(
            RankShares(
                log.rank,
                computing,
                total(busy) - total(exposed),
                total(exposed),
                total(waited),
                # Below 0 only by rounding.
                max(0.0, aligned_ranks.length_s - computing - total(exposed)),
            )
        )
    return tuple(shares)


def stragglers_of(aligned_ranks: AlignedRanks) -> tuple[Straggler, ...]:
    """List the ranks that others waited for at collectives, those that cost most first."""
    delays: dict[int, list[tuple[float, float]]] = defaultdict(list)
    matched = matched_collectives(aligned_ranks.ranks)
    for members in matched:
        starts = sorted((exchange.start_s, rank) for rank, exchange in members.items())
        moment, rank = starts[-1]
        # Mean over the ranks that came before.
        mean = sum(moment - start for start, _ in starts[:-1]) / (len(starts) - 1)
        delays[rank].append((mean, moment - starts[-2][0]))
    stragglers = [
        Straggler(
            rank,
            len(rank_delays),
            len(matched),
            sum(mean for mean, _ in rank_delays),
            float(np.median([late for _, late in rank_delays])),
        )
        for rank, rank_delays in delays.items()
    ]
    return tuple(sorted(stragglers, key=lambda straggler: -straggler.waited_s))
