"""Sum up the profiler's trace of one rank, of any program, and lay two of them beside each other.

**What is counted.** Device work that is launched between the first and the last step; without steps, all of the trace.
Steps are torch.profiler's marks `ProfilerStep#N`, else what lies between the ends of `Optimizer.step#…`, which torch
marks by itself. The time is that from the first step's start to the end of the last step's work, so that computing,
exposed communication and idle time add up to it.

**Kinds** follow from names of kernels (cuBLAS, cuDNN, CUTLASS, ROCm's Tensile, FlashAttention, torch, Inductor, Triton,
NCCL); without a device, from names of torch's operators, whose time is that without the operators that they call.

**Why a device idles.** A kernel and the call that launches it have the same correlation number. If the device fell idle
before the next kernel was launched, nothing was queued: it waited for the CPU, which loads data, resumes after a
synchronisation, or launches more slowly than the device computes (launch-bound). If that kernel was launched before, it
waited for another stream, or this is what a start takes.

Source of the fields: Kineto, `libkineto/src/output_json.cpp` and `CuptiActivity.cpp`.
"""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlojz.base.table import visible
from dlojz.results.profiler_trace import MOST_RANKS, TraceFile, phrase
from dlojz.results.rank_activities import (
    COMMUNICATES,
    DEVICE,
    HOST,
    LAUNCHES,
    OPTIMIZER,
    AlignedRanks,
    CollectiveShare,
    RankActivities,
    activities_of,
    aligned,
    collectives_of,
    launch_moments,
    merged,
    rows_of,
    shares_of,
    total,
    whole_number,
    without,
)

KINDS: Mapping[str, re.Pattern[str]] = {
    kind: re.compile(words, re.IGNORECASE)
    for kind, words in {
        "communication": COMMUNICATES.pattern + "|^c10d::|^_c10d_functional|^record_param_comms|^(gloo|mpi|ucc):",
        "attention": r"flash|fmha|attention|sdpa|\bmha_|fav[23]_",
        "product": r"gemm|gemv|nvjet|cutlass|cublas|xmma|cijk_|conv(?!ert)|winograd|[dw]grad|splitk|triton_(\w*_)?mm\b"
        r"|triton_tem_|matmul|aten::(add)?(b?mm|mv|bmm|linear|dot|einsum)|baddbmm|_scaled_mm|grouped_mm|fmoe",
        "normalisation": r"norm(?!al)|softmax|\bbn_[fb]w|welford|rsqrt",
        "copy": r"^mem(cpy|set)|copy|\bcat(array)?|aten::(cat|stack|to|clone|contiguous|fill_|zero_|zeros|empty\w*)$"
        r"|transpose|nchwtonhwc|nhwctonchw|fillfunctor",
        "elementwise": r"elementwise|triton_poi_|multi_tensor_apply|dropout|activation|gelu|silu|relu|aten::(add|sub"
        r"|mul|div|sqrt|neg|exp|log|pow|tanh|sigmoid|where|add\w+|_foreach\w+|_fused\w+)_?$",
        "reduction": r"reduce|triton_(red|per)_|cub::|scan|sort|topk|aten::(sum|mean|max|min|argmax|nll_loss\w*)$",
    }.items()
}
"""Kinds in the order in which a name is tried; a name that none of these finds is of the kind `other`."""
OTHER_KIND = "other"
LAUNCH_BOUND = 0.1
"""Part of the time, idle because the CPU launches too slowly, from which on a rank is called launch-bound. A choice."""
MOST_SECONDS_APART = 1e-9
_STEP = re.compile(r"ProfilerStep ?#(\d+)")
_LOADING = re.compile(r"enumerate\(DataLoader\)|_BaseDataLoaderIter|_next_data")
_WAITS = re.compile(r"Synchronize$|^(cuda|hip)Memcpy$")
"""Calls that return when the device has done what was queued."""


class KernelTime(NamedTuple):
    """All kernels (or operators) of one name: how often, their seconds in sum, the longest of them."""

    name: str
    kind: str
    calls: int
    seconds: float
    longest_s: float


class KindTime(NamedTuple):
    """All kernels of one kind."""

    kind: str
    calls: int
    seconds: float


@dataclass(frozen=True)
class DeviceIdling:
    """Why the device idles, in seconds of the time that is counted.

    Attributes:
        known, kernels: kernels whose launch is in the trace, and all.
        delay_s: median time from a launch to the start of its kernel.
        spacing_s: median time between two launches.
        kernel_s: median length of a kernel.
        loading_s, synchronised_s, running_s: idle while nothing was queued: the CPU loads data; a synchronisation had
            let the queue run empty; it runs operators and Python.
        queued_s: idle though the next kernel was launched.
        unknown_s: idle before a kernel whose launch is not in the trace.
        synchronisations: calls that wait for the device.
    """

    known: int
    kernels: int
    delay_s: float
    spacing_s: float
    kernel_s: float
    loading_s: float
    synchronised_s: float
    running_s: float
    queued_s: float
    unknown_s: float
    synchronisations: int
    length_s: float

    @property
    def bound(self) -> bool | None:
        """Whether the rank is launch-bound; None if most launches are not in the trace."""
        if self.known < self.kernels / 2:
            return None
        return self.running_s >= LAUNCH_BOUND * self.length_s


@dataclass(frozen=True)
class RankProfile:
    """What one rank does in its steps.

    Attributes:
        rank: None where the trace does not say.
        devices: names of the GPUs; empty where the trace does not say.
        step_mark: what marks the steps; empty where nothing does.
        steps_s: length of each step on the host.
        log: activities within the time that is counted, as `shares` and `communication` sum them up.
        kernels: of a device, else operators of torch; most seconds first.
        launching: None without a device.
        outside: kernels or operators that are not counted, as they are of no step.
        repeated: events of the device that the file has twice, counted once.
        device_count: devices that kernels ran on.
        launches: calls that launch kernels, also where there are no kernels.
    """

    name: str
    rank: int | None
    world_size: int | None
    devices: tuple[str, ...]
    step_mark: str
    steps_s: tuple[float, ...]
    length_s: float
    log: RankActivities
    kernels: tuple[KernelTime, ...]
    launching: DeviceIdling | None
    outside: int
    repeated: int
    device_count: int
    launches: int

    @property
    def steps(self) -> int:
        """Number of steps; 1 where none is marked: the whole."""
        return len(self.steps_s) or 1

    @cached_property
    def together(self) -> AlignedRanks:
        """The rank alone on its clock, as for several ranks."""
        return aligned([self.log])

    @property
    def parts_s(self) -> dict[str, float]:
        """Seconds of computing, exposed communication and idle time, which are all of it; and of the hidden."""
        (share,) = shares_of(self.together)
        return {
            "computing": share.computing_s,
            "exposed": share.exposed_s,
            "idle": max(0.0, self.length_s - share.computing_s - share.exposed_s),
            "hidden": share.hidden_s,
        }

    @property
    def communication(self) -> tuple[CollectiveShare, ...]:
        """Communication by kind; a part of what is exposed may be a wait for other ranks."""
        return collectives_of(self.together)

    @property
    def kinds(self) -> tuple[KindTime, ...]:
        """Kernels by kind, most seconds first."""
        sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        for row in self.kernels:
            sums[row.kind][0] += row.calls
            sums[row.kind][1] += row.seconds
        rows = (KindTime(kind, int(calls), seconds) for kind, (calls, seconds) in sums.items())
        return tuple(sorted(rows, key=lambda row: -row.seconds))


def kind_of_kernel(name: str) -> str:
    """Classify a kernel, or an operator of torch, by its name."""
    return next((kind for kind, words in KINDS.items() if words.search(name)), OTHER_KIND)


def profile_of(trace: TraceFile) -> RankProfile:
    """Read the trace of one rank, of which no other rank need be known.

    Raises:
        LabError: as `activities_of`, and if nothing runs within the steps.
    """
    events = _Events()
    log = activities_of(trace, events.add)
    return events.profile(trace, log)


class _Events:
    """What is kept of the events: kernels, launches, operators, marks of steps and of what the CPU waits for."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        # Rows of 5: name, lane, correlation, start, end; on the host without correlation.
        self.kernels, self.operators = array("d"), array("d")
        self.launches = array("d")  # correlation, start, end
        self.waits, self.loading = array("d"), array("d")
        self.steps: dict[str, tuple[float, float]] = {}
        self.updates: dict[str, list[float]] = defaultdict(list)  # ends
        self.lanes: dict[str, int] = {}
        self.devices: set[object] = set()

    def add(self, kind: str, name: str, begin: float, end: float, event: Mapping[str, Any]) -> None:
        """Keep what matters of an event (a `Listener`)."""
        lane = self.lanes.setdefault(f"{event.get('pid')}/{event.get('tid')}", len(self.lanes))
        number = whole_number(event, "correlation")
        if kind in DEVICE:
            name_id = self.names.setdefault(name, len(self.names))
            self.kernels.extend((name_id, lane, number, begin, end))
            self.devices.add(whole_number(event, "device"))
        elif kind in LAUNCHES:
            self.launches.extend((number, begin, end))
            if _WAITS.search(name):
                self.waits.extend((begin, end))
        elif kind != "gpu_user_annotation":
            if step := _STEP.match(name):
                self.steps[step[1]] = begin, end
            elif OPTIMIZER.match(name):
                self.updates[name].append(end)
            elif _LOADING.search(name):
                self.loading.extend((begin, end))
            elif kind == HOST:
                self.operators.extend((self.names.setdefault(name, len(self.names)), lane, -1, begin, end))

    def profile(self, trace: TraceFile, log: RankActivities) -> RankProfile:
        """Sum up all that was kept."""
        kernels, launches = rows_of(self.kernels, 5), rows_of(self.launches, 3)
        unique = np.unique(kernels, axis=0) if len(kernels) else kernels
        repeated, kernels = len(kernels) - len(unique), unique[np.argsort(unique[:, 3], kind="stable")]
        on_device, operators = bool(len(kernels)), rows_of(self.operators, 5)
        launched_s = launch_moments(kernels[:, 2], launches[:, :2])
        step_mark, steps = self._steps(min([log.first_s, *operators[:, 3].tolist()]))
        rows = kernels if on_device else operators
        counted, start_s, end_s = np.ones(len(rows), bool), log.first_s, log.last_s
        if on_device and not steps:
            start_s, end_s = float(rows[:, 3].min()), float(rows[:, 4].max())
        if steps:
            # A kernel is of the steps that launch it, wherever it runs; without a launch, where it starts.
            moments_s = np.where(np.isnan(launched_s), rows[:, 3], launched_s) if on_device else rows[:, 3]
            start_s, end_s = steps[0][0], steps[-1][1]
            counted = (moments_s >= start_s) & (moments_s <= end_s)
            end_s = max([end_s, *rows[counted, 4].tolist()]) if on_device else end_s
        if not counted.any():
            raise phrase.refused("nothing within the steps", trace=trace, steps=len(steps))
        info = trace.head.get("distributedInfo")
        size = info.get("world_size") if isinstance(info, dict) else None
        properties = trace.head.get("deviceProperties")
        names = [gpu.get("name") for gpu in properties if isinstance(gpu, dict)] if isinstance(properties, list) else []
        length_s = end_s - start_s
        return RankProfile(
            trace.name,
            log.rank if log.rank >= 0 else None,
            size if isinstance(size, int) and 0 < size <= MOST_RANKS else None,
            tuple(dict.fromkeys(visible(name) for name in names if isinstance(name, str))),
            step_mark,
            tuple(end - start for start, end in steps),
            length_s,
            log.clipped(start_s, end_s),
            self._times(rows[counted], None if on_device else _self_seconds(operators)[counted]),
            self._launching(kernels[counted], launched_s[counted], (start_s, end_s)) if on_device else None,
            int((~counted).sum()),
            repeated,
            len(self.devices),
            len(launches) - len(self.waits) // 2,
        )

    def _steps(self, first_s: float) -> tuple[str, list[tuple[float, float]]]:
        """What marks the steps, and start and end of each, in order."""
        if self.steps:
            return "ProfilerStep", sorted(self.steps.values())
        if not self.updates:
            return "", []
        # Of several optimizers, the one that ends last.
        ends_s = sorted(max(self.updates.values(), key=max))
        return "Optimizer.step", list(zip([first_s, *ends_s[:-1]], ends_s, strict=True))

    def _times(self, rows: NDArray[np.float64], seconds: NDArray[np.float64] | None) -> tuple[KernelTime, ...]:
        """Sum rows by name."""
        if seconds is None:
            seconds = rows[:, 4] - rows[:, 3]
        ids = rows[:, 0].astype(np.int64)
        calls, sums = np.bincount(ids), np.bincount(ids, seconds)
        longest = np.zeros(len(calls))
        np.maximum.at(longest, ids, seconds)
        names = list(self.names)
        times = [
            KernelTime(
                names[index], kind_of_kernel(names[index]), int(calls[index]), float(sums[index]), float(longest[index])
            )
            for index in np.flatnonzero(calls)
        ]
        return tuple(sorted(times, key=lambda row: (-row.seconds, row.name)))

    def _launching(
        self, kernels: NDArray[np.float64], launched_s: NDArray[np.float64], window: tuple[float, float]
    ) -> DeviceIdling:
        """Say for each gap of the device what it waited for; kernels in the order of their starts."""
        gaps = without(np.array([window]), merged(kernels[:, 3:]))  # (gaps, 2)
        # The kernel that ends a gap; behind the last kernel there is none: nothing is launched any more.
        following = np.searchsorted(kernels[:, 3], gaps[:, 1] - MOST_SECONDS_APART)
        next_launch_s = np.append(launched_s, np.inf)[following]
        unknown, queued = np.isnan(next_launch_s), next_launch_s <= gaps[:, 0]
        late = gaps[~unknown & ~queued]
        loading = merged(rows_of(self.loading, 2))
        while_loading = without(late, without(late, loading))
        # A call that waits returns when the device has just fallen idle.
        waits = rows_of(self.waits, 2)
        waits = waits[(waits[:, 1] >= window[0]) & (waits[:, 0] <= window[1])]
        ends_s = np.sort(waits[:, 1])
        # An end of a wait within the gap: the first end from its start on lies before its own end.
        first_end = np.searchsorted(ends_s, late[:, 0] - MOST_SECONDS_APART)
        after_wait = np.append(ends_s, np.inf)[first_end] <= late[:, 1]
        traced_launches_s = launched_s[~np.isnan(launched_s)]
        delays_s = (kernels[:, 3] - launched_s)[~np.isnan(launched_s)]
        spacings_s = np.diff(np.unique(traced_launches_s))
        synchronised_s = total(without(late[after_wait], loading))
        return DeviceIdling(
            len(traced_launches_s),
            len(kernels),
            float(np.median(delays_s)) if len(traced_launches_s) else 0.0,
            float(np.median(spacings_s)) if len(spacings_s) else 0.0,
            float(np.median(kernels[:, 4] - kernels[:, 3])),
            total(while_loading),
            synchronised_s,
            max(0.0, total(late) - total(while_loading) - synchronised_s),
            total(gaps[queued & ~unknown]),
            total(gaps[unknown]),
            len(waits),
            window[1] - window[0],
        )


def _self_seconds(operators: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds of each operator without those that it calls on its thread."""
    lengths_s = operators[:, 4] - operators[:, 3]
    selves_s = lengths_s.copy()
    callers: list[int] = []
    lane = -1.0
    # By thread, then by start; of two that start together the longer calls the other.
    for index in np.lexsort((-lengths_s, operators[:, 3], operators[:, 1])).tolist():
        if operators[index, 1] != lane:
            callers, lane = [], operators[index, 1]
        while callers and operators[callers[-1], 4] <= operators[index, 3]:
            callers.pop()
        if callers:
            selves_s[callers[-1]] -= lengths_s[index]
        callers.append(index)
    return np.maximum(selves_s, 0.0)


class Change(NamedTuple):
    """Seconds and calls of a name, a kind or a part of the time in two traces, per step; 0 calls: not there."""

    name: str
    before_s: float
    after_s: float
    before_calls: float = 0.0
    after_calls: float = 0.0

    @property
    def difference_s(self) -> float:
        """Seconds that it takes longer in the second."""
        return self.after_s - self.before_s

    @property
    def by_calls_s(self) -> float | None:
        """Part of the difference that follows from the number of calls; None where it is in one of them alone."""
        if not self.before_calls or not self.after_calls:
            return None
        return (self.after_calls - self.before_calls) * self.before_s / self.before_calls


@dataclass(frozen=True)
class ProfileComparison:
    """Two traces of one program beside each other, per step where steps are marked; largest difference first."""

    before: RankProfile
    after: RankProfile
    length: Change
    parts: tuple[Change, ...]
    kinds: tuple[Change, ...]
    kernels: tuple[Change, ...]

    @property
    def per_step(self) -> bool:
        """Whether the figures are per step, else of the whole traces."""
        return bool(self.before.step_mark)


def compared(before: RankProfile, after: RankProfile) -> ProfileComparison:
    """Lay two traces of one program beside each other.

    Raises:
        LabError: if steps are marked, or a device traced, in one of them only.
    """
    for first, second in ((before, after), (after, before)):
        if first.log.on_device and not second.log.on_device:
            raise phrase.refused("device beside CPU", first=first, second=second)
        if first.step_mark and not second.step_mark:
            raise phrase.refused("steps of one alone", first=first, steps=len(first.steps_s), second=second)

    def change(name: str, first: Sequence[float], second: Sequence[float]) -> Change:
        (before_s, before_calls), (after_s, after_calls) = first, second
        return Change(
            name, before_s / before.steps, after_s / after.steps, before_calls / before.steps, after_calls / after.steps
        )

    def changes(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[Change]:
        for name in dict.fromkeys([*first, *second]):
            yield change(
                name, *([row.seconds, row.calls] if (row := side.get(name)) else [0, 0] for side in (first, second))
            )

    def sorted_changes(side: str, key: str) -> tuple[Change, ...]:
        rows = [{getattr(row, key): row for row in getattr(profile, side)} for profile in (before, after)]
        return tuple(sorted(changes(*rows), key=lambda row: -abs(row.difference_s)))

    first_parts, second_parts = before.parts_s, after.parts_s
    return ProfileComparison(
        before,
        after,
        change("length", (before.length_s, 0), (after.length_s, 0)),
        tuple(change(part, (first_parts[part], 0), (second_parts[part], 0)) for part in first_parts),
        sorted_changes("kinds", "kind"),
        sorted_changes("kernels", "name"),
    )
