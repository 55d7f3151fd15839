"""Device placement of branches: steps by hand, greedy against all placements, memory, refusals."""

from __future__ import annotations

import itertools
import random

import pytest

from dlojz.plan.alpa.branches import Devices, Task, two_towers
from dlojz.plan.alpa.placement import exhaustive, greedy, simulate
from dlojz.schema import LabError

PAIR = Devices(2, 1e9)


@pytest.mark.parametrize(
    "bytes_per_s, exchange, step_s",
    [
        (1e8, False, 7.0),  # a message takes 10 s: all on one device, 2 × ½ + 6 × 1 s
        (1e9, False, 5.0),  # ½ + message ½ + 3 + ½ on the second device, and the other result arrives meanwhile
        (1e10, False, 4.1),
        (1e10, True, 4.2),
    ],
)
def test_two_towers_by_hand(bytes_per_s: float, exchange: bool, step_s: float) -> None:
    tasks, devices = two_towers(3, 1.0, 1e9, exchange), Devices(2, bytes_per_s)
    assert exhaustive(tasks, devices).step_s == pytest.approx(step_s, rel=1e-12)
    assert greedy(tasks, devices).step_s == pytest.approx(step_s, rel=1e-12)


def test_one_link_carries_one_tensor_at_a_time() -> None:
    tasks = [Task("a", 1, 1e9), Task("b", 1, 1e9), Task("c", 1, 0, ("a", "b"))]
    run = simulate(tasks, PAIR, {"a": 0, "b": 0, "c": 1})
    assert run.step_s == 2 + 1 + 1  # a's tensor is sent while b runs
    assert simulate(tasks, PAIR, {"a": 0, "b": 1, "c": 1}).step_s == 1 + 1 + 1


def random_tasks(generator: random.Random, count: int) -> list[Task]:
    tasks: list[Task] = []
    for number in range(count):
        inputs = tuple(task.name for task in tasks if generator.random() < 0.4)
        tasks.append(Task(f"t{number}", generator.randint(1, 9), generator.randint(0, 4) * 1e9, inputs, 1.0))
    return tasks


def test_30_random_graphs_greedy_is_never_better_than_all() -> None:
    generator = random.Random(0)
    for _ in range(30):
        tasks = random_tasks(generator, generator.randint(1, 6))
        devices = Devices(generator.randint(1, 3), 1e9)
        best, quick = exhaustive(tasks, devices), greedy(tasks, devices)
        every = [
            simulate(tasks, devices, dict(zip([task.name for task in tasks], given, strict=True))).step_s
            for given in itertools.product(range(devices.count), repeat=len(tasks))
        ]
        assert best.step_s == min(every)
        assert best.step_s <= quick.step_s
        assert best.tried <= len(every)
        for run in (best, quick):
            ends = {slot.name: slot.end_s for slot in run.slots}
            assert all(ends[name] <= slot.start_s for slot in run.slots for name in _task(tasks, slot.name).inputs)


def _task(tasks: list[Task], name: str) -> Task:
    return next(task for task in tasks if task.name == name)


def test_memory_spreads_what_time_would_not() -> None:
    tasks = [task._replace(memory_bytes=1.0) for task in two_towers(2, 1.0, 1e9)]
    slow = Devices(2, 1e7, memory_bytes=3.0)
    found = exhaustive(tasks, slow)
    assert found.device_bytes == (3.0, 3.0)
    assert max(greedy(tasks, slow).device_bytes) <= 3.0
    with pytest.raises(LabError, match=r"do not fit on 2 devices of 2 B: each would need at least 3 B \(6 B in all\)"):
        exhaustive(tasks, Devices(2, 1e7, memory_bytes=2.0))


def test_bad_input() -> None:
    tasks = two_towers()
    with pytest.raises(LabError, match=r"at least one device and a bandwidth above 0, but count=0"):
        Devices(0, 1e9)
    with pytest.raises(LabError, match=r"task 'join' has no device: give it one from 0 to 1"):
        simulate(tasks, PAIR, {task.name: 0 for task in tasks[:-1]} | {"join": 2})
    with pytest.raises(LabError, match=r"must come once, and after 'later'"):
        greedy([Task("a", 1, 0, ("later",)), Task("later", 1)], PAIR)
    with pytest.raises(LabError, match=r"no task to place"):
        exhaustive([], PAIR)
    with pytest.raises(LabError, match=r"too many placements to try them all: use 18 tasks at most"):
        exhaustive(two_towers(12), PAIR)
