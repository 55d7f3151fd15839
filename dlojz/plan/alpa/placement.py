"""Where it all began: one device for each operator of a graph with branches.

Before tensors were sharded, a model that was too large or too slow for one device was placed on several, operator by
operator. How good a placement is, a run told; here a simulation does: an operator starts when its device is free and
all its inputs have arrived. Mirhoseini et al. let a network learn placements by trying them; on a small graph all can
be tried, and a greedy rule comes near.

Layer 4. Invariant: a device runs one operator at a time, a link carries one tensor at a time; sending between devices
takes latency + bytes ÷ bandwidth and does not hold up computation. No torch; matplotlib only to draw.

Sources: Mirhoseini et al. 2017, "Device Placement Optimization with Reinforcement Learning" (arXiv 1706.04972), §3, for
the problem and its objective (the time of a step); Topcuoglu, Hariri & Wu 2002 (IEEE TPDS 13(3)), §4, for the greedy
rule HEFT: the operator with the longest way to the end first, each where it ends soonest.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from dlojz.plan.alpa.branches import Devices, Task
from dlojz.plan.alpa.showing import ShownAsTable
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from dlojz.viz.canvas import LabFigure

MOST_TRIALS = 200_000


class Slot(NamedTuple):
    """When and where a task ran."""

    name: str
    device: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Placement(ShownAsTable):
    """A device for each task, and when each runs.

    Args:
        slots: in the order in which they start.
        tried: placements that were simulated to find it.
        method: `exhaustive`, `greedy` or `given`.
        device_bytes: memory that stays on each device.
    """

    slots: tuple[Slot, ...]
    tried: int
    method: str
    device_bytes: tuple[float, ...] = field(default=())

    @property
    def step_s(self) -> float:
        """When the last task ends."""
        return max(slot.end_s for slot in self.slots)

    @property
    def device_of(self) -> dict[str, int]:
        """Device of each task."""
        return {slot.name: slot.device for slot in self.slots}

    def title(self) -> str:
        """How long it takes, and how it was found."""
        method = {
            "exhaustive": say(en="all tried", fr="tous essayés"),
            "greedy": say(en="greedy", fr="glouton"),
            "given": say(en="given", fr="donné"),
        }[self.method]
        return say(
            en=f"Placement ({method}, {self.tried} simulated): {format_seconds(self.step_s)}",
            fr=f"Placement ({method}, simulés : {self.tried}) : {format_seconds(self.step_s)}",
        )

    def columns(self) -> tuple[str, ...]:
        """Headings of the table."""
        return (
            say(en="operator", fr="opérateur"),
            say(en="device", fr="périphérique"),
            say(en="from", fr="de"),
            say(en="to", fr="à"),
        )

    def rows(self) -> list[tuple[str, ...]]:
        """One line per task."""
        return [
            (slot.name, str(slot.device), format_seconds(slot.start_s), format_seconds(slot.end_s))
            for slot in self.slots
        ]

    def figure(self) -> LabFigure:
        """Devices over time."""
        from dlojz.viz.alpa_figure import placement_figure

        return placement_figure(self)


def simulate(tasks: Sequence[Task], devices: Devices, device_of: Mapping[str, int]) -> Placement:
    """Run a given placement.

    Tasks start in order of their rank (longest way to the end first), each as soon as its device and its inputs allow.

    Raises:
        LabError: a task without device, a device that does not exist, or inputs that no earlier task makes.
    """
    _check(tasks)
    missing = [task.name for task in tasks if not 0 <= device_of.get(task.name, -1) < devices.count]
    if missing:
        raise LabError(
            say(
                en=f"task {missing[0]!r} has no device: give it one from 0 to {devices.count - 1}.",
                fr=f"la tâche {missing[0]!r} n’a pas de périphérique : donnez-lui en un de 0 à {devices.count - 1}.",
            )
        )
    run = _Run(tasks, devices)
    for task in ranked(tasks, devices):
        run.put(task, device_of[task.name])
    return run.placement(1, "given")


def greedy(tasks: Sequence[Task], devices: Devices) -> Placement:
    """HEFT: the task with the longest way to the end first, each on the device where it ends soonest and fits.

    Raises:
        LabError: a task fits on no device.
    """
    _check(tasks)
    run = _Run(tasks, devices)
    for task in ranked(tasks, devices):
        fitting = [one for one in range(devices.count) if run.held[one] + task.memory_bytes <= devices.memory_bytes]
        if not fitting:
            raise LabError(_does_not_fit(tasks, devices))
        run.put(task, min(fitting, key=lambda one: (run.end_on(task, one), one)))
    return run.placement(1, "greedy")


def exhaustive(tasks: Sequence[Task], devices: Devices) -> Placement:
    """The best of all placements, each run in the order of `ranked`.

    Placements that differ by the numbers of the devices only are tried once.

    Raises:
        LabError: too many placements to try, or none that fits.
    """
    _check(tasks)
    if devices.count ** max(len(tasks) - 1, 0) > MOST_TRIALS:
        most = next(count for count in itertools.count(1) if devices.count**count > MOST_TRIALS)
        raise LabError(
            say(
                en=f"{len(tasks)} tasks on {devices.count} devices have too many placements to try them all: use "
                f"{most} tasks at most, or greedy().",
                fr=f"{len(tasks)} tâches sur {devices.count} périphériques ont trop de placements pour les essayer "
                f"tous : prenez {most} tâches au plus, ou greedy().",
            )
        )
    order = ranked(tasks, devices)
    best: Placement | None = None
    tried = 0
    for numbers in _numberings(len(order), devices.count):
        run = _Run(tasks, devices)
        for task, device in zip(order, numbers, strict=True):
            run.put(task, device)
        if max(run.held) > devices.memory_bytes:
            continue
        tried += 1
        found = run.placement(tried, "exhaustive")
        if best is None or found.step_s < best.step_s:
            best = found
    if best is None:
        raise LabError(_does_not_fit(tasks, devices))
    return Placement(best.slots, tried, "exhaustive", best.device_bytes)


def ranked(tasks: Sequence[Task], devices: Devices) -> list[Task]:
    """Tasks by the longest way to the end, computation and messages included (HEFT's rank); inputs come first."""
    way: dict[str, float] = {}
    for task in reversed(tasks):
        readers = [other for other in tasks if task.name in other.inputs]
        message_s = devices.latency_s + task.output_bytes / devices.bytes_per_s if devices.count > 1 else 0.0
        way[task.name] = task.time_s + max((message_s + way[reader.name] for reader in readers), default=0.0)
    number = {task.name: index for index, task in enumerate(tasks)}
    # Of tasks with equal ways (those that take no time) the earlier first, so that inputs still come before readers.
    return sorted(tasks, key=lambda task: (-way[task.name], number[task.name]))


class _Run:
    """Devices and links, and when each is free."""

    def __init__(self, tasks: Sequence[Task], devices: Devices) -> None:
        self.tasks = {task.name: task for task in tasks}
        self.devices = devices
        self.free = [0.0] * devices.count
        self.held = [0.0] * devices.count
        self.link_free: dict[tuple[int, int], float] = {}
        self.slots: dict[str, Slot] = {}
        self.arrived: dict[tuple[str, int], float] = {}

    def _arrivals(self, task: Task, device: int) -> Iterator[tuple[str, tuple[int, int] | None, float]]:
        """Each input, the link it comes over, and when it is there."""
        link_free = dict(self.link_free)
        for name in task.inputs:
            made = self.slots[name]
            if made.device == device or (name, device) in self.arrived:
                yield name, None, self.arrived.get((name, device), made.end_s)
                continue
            link = (made.device, device)
            message_s = self.devices.latency_s + self.tasks[name].output_bytes / self.devices.bytes_per_s
            link_free[link] = max(made.end_s, link_free.get(link, 0.0)) + message_s
            yield name, link, link_free[link]

    def end_on(self, task: Task, device: int) -> float:
        """When the task would end on this device."""
        ready = max((time for _, _, time in self._arrivals(task, device)), default=0.0)
        return max(ready, self.free[device]) + task.time_s

    def put(self, task: Task, device: int) -> None:
        """Run the task there; a result that has been sent once is not sent again."""
        ready = 0.0
        for name, link, time in list(self._arrivals(task, device)):
            ready = max(ready, time)
            if link is not None:
                self.link_free[link] = time
                self.arrived[name, device] = time
        start = max(ready, self.free[device])
        self.slots[task.name] = Slot(task.name, device, start, start + task.time_s)
        self.free[device] = start + task.time_s
        self.held[device] += task.memory_bytes

    def placement(self, tried: int, method: str) -> Placement:
        """What has run."""
        slots = tuple(sorted(self.slots.values(), key=lambda slot: (slot.start_s, slot.device)))
        return Placement(slots, tried, method, tuple(self.held))


def _numberings(count: int, devices: int) -> Iterator[tuple[int, ...]]:
    """Devices of all tasks; a device is used only after all with smaller numbers are, as devices are alike."""
    if count == 0:
        yield ()
        return
    for before in _numberings(count - 1, devices):
        used = max(before, default=-1)
        for device in range(min(used + 2, devices)):
            yield (*before, device)


def _does_not_fit(tasks: Sequence[Task], devices: Devices) -> str:
    largest = max(tasks, key=lambda task: task.memory_bytes)
    total = sum(task.memory_bytes for task in tasks)
    needed = max(largest.memory_bytes, total / devices.count)
    has, least = format_bytes(devices.memory_bytes), format_bytes(needed)
    return say(
        en=f"these tasks do not fit on {devices.count} devices of {has}: each would need at least {least} "
        f"({format_bytes(total)} in all): use more or larger devices.",
        fr=f"ces tâches ne tiennent pas sur {devices.count} périphériques de {has} : il faudrait au moins {least} par "
        f"périphérique ({format_bytes(total)} en tout) : prenez des périphériques plus nombreux ou plus grands.",
    )


def _check(tasks: Sequence[Task]) -> None:
    known: set[str] = set()
    for task in tasks:
        bad = next((name for name in task.inputs if name not in known), None)
        if bad is not None or task.name in known:
            raise LabError(
                say(
                    en=f"task {task.name!r} must come once, and after {bad or task.name!r}: list the tasks in an order "
                    "in which they can run.",
                    fr=f"la tâche {task.name!r} doit figurer une seule fois, et après {bad or task.name!r} : donnez "
                    "les tâches dans un ordre où elles peuvent s’exécuter.",
                )
            )
        known.add(task.name)
    if not tasks:
        raise LabError(
            say(
                en="there is no task to place: give at least one.", fr="il n’y a aucune tâche à placer : donnez-en une."
            )
        )
