"""Search the layouts: bytes and seconds of all of them, the Pareto front, each stage's memory, the best ones simulated.

A layout is timed unless its space, its bytes or the time allowed refuse it; the order of what is left is the cost
model's. Pruning saves time, never a layout: the tests compare with a search that prunes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dlojz.base.errors import LabError
from dlojz.cost_model import Calibration, Memories, Parts, StepSimulation, simulate, step_parts
from dlojz.cost_model.layout_memory import in_flight, stage_memory
from dlojz.cost_model.layouts import Integers, Reals
from dlojz.cost_model.passes import stages_of
from dlojz.cost_model.step import weights_of
from dlojz.hardware import Cluster, Device
from dlojz.planner.planned_memory import RankMemory, forecast_ranks, searched_memories
from dlojz.planner.space import CODE, PlannedLayout, Space, layouts_of

MOST_ACTIONS: Final = 200_000
"""Of all simulated schedules together: forwards and backwards of micro-batches on all stages; about a second."""
MOST_SIMULATED: Final = 12


@dataclass(frozen=True, eq=False)
class SearchResult:
    """Result of a search.

    Attributes:
        codes: why each layout is out; 0 for those admitted.
        admitted: flat places of the admitted layouts, fastest first.
        parts, memory: of these, in this order.
        energy_j: of a step of each, all GPUs.
        heavy: flat places of those that bytes refuse, and what each would need.
        heavy_bytes: on the fullest GPU.
        fastest_s: shortest step of all that fit, those among them that the time allowed refuses; infinite if none fits.
    """

    space: Space
    codes: NDArray[np.uint8]
    admitted: Integers
    parts: Parts
    memory: Memories
    energy_j: Reals
    heavy: Integers
    heavy_bytes: Reals
    fastest_s: float

    @property
    def step_s(self) -> Reals:
        """Seconds of a step of every admitted layout, ascending."""
        return self.parts.step_s

    @property
    def gpus(self) -> Integers:
        """GPUs of every admitted layout."""
        gpus: Integers = self.space.degrees["gpus"][self.admitted // self.codes.shape[1]]
        return gpus

    @property
    def num_layouts(self) -> int:
        """Layouts of the space, those that say the same as a plainer one not counted."""
        return int(np.count_nonzero(self.codes != CODE["same"]))


def search(space: Space, cluster: Cluster, calibration: Calibration, *, step_limit_s: float = np.inf) -> SearchResult:
    """Search a whole space: bytes and seconds of every layout.

    Args:
        step_limit_s: a step that takes longer does not end within the time allowed.
    """
    codes = space.codes.copy()
    flat = codes.reshape(-1)
    places = np.flatnonzero(flat == 0)
    columns = space.columns(places)
    layouts = space.cost_layouts(columns)
    held = searched_memories(space, columns, cluster.gpu)  # bytes first: seconds are computed for what fits alone
    total = held.total_bytes
    too_much = total > cluster.gpu.memory_bytes
    here = np.minimum(cluster.gpus_per_node, columns["gpus"])  # ranks that share one host
    on_host = held.host * here > cluster.host_memory_bytes
    flat[places[on_host]] = CODE["host"]
    flat[places[too_much]] = CODE["memory"]  # last, so that a layout refused for both says "memory"
    kept = ~(too_much | on_host)
    parts = step_parts(space.subject.workload, cluster, layouts[kept], calibration)
    slow = parts.step_s > step_limit_s
    # `places[kept][slow]`: flat index of each layout that fits but is slow.
    flat[places[kept][slow]] = CODE["hours"]
    # Slow ones sort last and are cut off.
    order = np.argsort(np.where(slow, np.inf, parts.step_s), kind="stable")[: int((~slow).sum())]
    found = Parts(**{one.name: getattr(parts, one.name)[order] for one in fields(Parts)})
    memory = Memories(**{one.name: getattr(held, one.name)[kept][order] for one in fields(Memories)})
    admitted = places[kept][order]
    gpus = space.columns(admitted)["gpus"]
    heavy = places[too_much | on_host]
    fastest_s = float(parts.step_s.min(initial=np.inf))  # before the hours are applied
    energy = energy_j(cluster, gpus, found)
    return SearchResult(space, codes, admitted, found, memory, energy, heavy, total[too_much | on_host], fastest_s)


def energy_j(cluster: Cluster, gpus: Integers, parts: Parts) -> Reals:
    """Energy of a step: idle power throughout, the rest while the GPUs compute.

    E = n·(t·idle + t_computing·(TDP − idle)). That GPUs which wait for messages draw idle power is our choice of a
    lower bound; with t_computing = t it is BLOOM's account (`dlojz.cost_model.bill`).
    """
    computing = parts.forward + parts.backward + parts.recompute + parts.optimizer
    return gpus * (parts.step_s * cluster.gpu.idle_w + computing * (cluster.gpu.tdp_w - cluster.gpu.idle_w))


def pareto(costs: NDArray[np.float64]) -> Integers:
    """Pareto front: rows that no other one dominates, in order of the first column.

    Args:
        costs: rows × objectives, the less the better. Of equal rows the first stays.
    """
    order = np.lexsort(costs.T[::-1])  # by the first column, then the second, …: lexsort's last key counts most
    left, front = costs[order], []
    while order.size:
        front.append(int(order[0]))
        # (rows,) of bool; the first row compares equal to itself, so it leaves too.
        worse = (left >= left[0]).all(axis=1)  # the first of what is left is beaten by nothing that is left
        order, left = order[~worse], left[~worse]
    return np.array(front, np.int64)


def front_of(found: SearchResult, device_bytes: float) -> Integers:
    """Pareto front of step time, GPU-hours, energy and free memory, as places in `admitted`."""
    gpus = found.gpus.astype(float)
    free = device_bytes - found.memory.total_bytes
    # All minimised, so free memory with a minus.
    costs = np.stack([found.step_s, gpus * found.step_s, found.energy_j, -free], axis=1)
    return pareto(costs)


def simulate_fastest(
    found: SearchResult, cluster: Cluster, calibration: Calibration, most: int = MOST_SIMULATED
) -> dict[int, StepSimulation]:
    """Simulate the fastest admitted layouts, as many as a second allows, the first in any case.

    Returns:
        by place in `admitted`.
    """
    made: dict[int, StepSimulation] = {}
    spent = 0
    columns = found.space.columns(found.admitted[:most])
    for place in range(min(most, found.admitted.size)):
        pp, number, chunks = (int(columns[name][place]) for name in ("pp", "micro_batches", "chunks"))
        spent += 2 * pp * number * chunks  # actions: forward and backward of each micro-batch on each stage and chunk
        if spent > MOST_ACTIONS and made:
            break
        try:
            # A slice of one keeps every column an array.
            layout = found.space.cost_layouts({name: column[place : place + 1] for name, column in columns.items()})
            made[place] = simulate(found.space.subject.workload, cluster, layout, calibration)
        except LabError:  # a schedule that refuses these numbers stays with its closed form
            continue
    return made


PARTS: Final = tuple(field.name for field in fields(Memories) if field.name != "host")
"""Categories on the device, in the order in which they are stacked."""


def rank_memories(space: Space, one: PlannedLayout, device: Device) -> list[RankMemory]:
    """Memory of a rank of every stage of one layout."""
    forecast = forecast_ranks(space, one, device)
    if forecast is not None:
        return forecast
    # Not the lab's: the closed form, stage by stage.
    work, layout = space.subject.workload, layouts_of([one], space)
    pp = one.pp
    stages = stages_of(work, pp, bool(layout.embedding_slots[0]))
    weights = weights_of(work, layout, stages)
    made = []
    for stage in range(pp):
        own = int(stages.order[stage])  # stages with equal layers are merged; rows of `counts`
        held = in_flight(layout, stage)
        memory = stage_memory(work, layout, stages.counts[own], held, weights[own])
        parts = {name: float(np.atleast_1d(getattr(memory, name))[0]) for name in PARTS}
        # A decoder's kinds: embedding, layer, logits; an image model's: blocks, all of them layers.
        layers = stages.counts[own][1] if work.size is not None else stages.counts[own].sum()
        made.append(RankMemory(stage, int(layers), float(held[0]), parts, float(np.atleast_1d(memory.host)[0])))
    return made


def fullest(ranks: list[RankMemory]) -> RankMemory:
    """Find the rank with the most bytes; of equal ones the first."""
    return max(ranks, key=lambda one: one.total_bytes)
