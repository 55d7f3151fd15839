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
from dlojz.config.fields import LayoutFields
from dlojz.cost_model import Memories, Parts, StepSimulation, simulate, step_parts
from dlojz.cost_model.layout_memory import in_flight, stage_memory
from dlojz.cost_model.layouts import Integers, Reals
from dlojz.cost_model.passes import stages_of
from dlojz.cost_model.step import weights_of
from dlojz.hardware import Cluster
from dlojz.planner.planned_memory import RankMemory, fits, forecast_ranks, searched_memories
from dlojz.planner.space import CODE, Space, candidates_of, columns_of

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

    def layout(self, index: int) -> LayoutFields:
        """The admitted layout of a place."""
        return candidates_of(self.space, self.admitted[index])[0]

    @property
    def num_layouts(self) -> int:
        """Layouts of the space, those that say the same as a plainer one not counted."""
        return int(np.count_nonzero(self.codes != CODE["same"]))


def search(space: Space) -> SearchResult:
    """Search a whole space: bytes and seconds of every layout."""
    question, codes = space.question, space.codes.copy()
    cluster = question.cluster
    flat = codes.reshape(-1)
    flat_indices = np.flatnonzero(flat == 0)
    columns = space.columns(flat_indices)
    layouts = space.cost_layouts(columns)
    memories = searched_memories(space, columns)  # bytes first: seconds are computed for what fits alone
    on_gpu, on_host = fits(space, columns, memories)
    flat[flat_indices[~on_host]] = CODE["host"]
    flat[flat_indices[~on_gpu]] = CODE["memory"]  # last, so that a layout refused for both says "memory"
    timed = on_gpu & on_host
    parts = step_parts(question.subject.workload, cluster, layouts[timed], question.calibration)
    slow = parts.step_s > question.step_limit_s  # does not end within the time allowed
    flat[flat_indices[timed][slow]] = CODE["hours"]
    # Slow ones sort last and are cut off.
    order = np.argsort(np.where(slow, np.inf, parts.step_s), kind="stable")[: int((~slow).sum())]
    admitted_parts = Parts(**{field.name: getattr(parts, field.name)[order] for field in fields(Parts)})
    memory = Memories(**{field.name: getattr(memories, field.name)[timed][order] for field in fields(Memories)})
    admitted = flat_indices[timed][order]
    gpus = space.columns(admitted)["gpus"]
    heavy, heavy_bytes = flat_indices[~timed], memories.total_bytes[~timed]
    fastest_s = float(parts.step_s.min(initial=np.inf))  # before the hours are applied
    energy = energy_j(cluster, gpus, admitted_parts)
    return SearchResult(space, codes, admitted, admitted_parts, memory, energy, heavy, heavy_bytes, fastest_s)


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
    remaining, front = costs[order], []
    while order.size:
        front.append(int(order[0]))
        # (rows,) of bool; the first row compares equal to itself, so it leaves too.
        worse = (remaining >= remaining[0]).all(axis=1)  # the first of what is left is beaten by nothing that is left
        order, remaining = order[~worse], remaining[~worse]
    return np.array(front, np.int64)


def front_of(result: SearchResult) -> Integers:
    """Pareto front of step time, GPU-hours, energy and free memory, as places in `admitted`."""
    gpus = result.gpus.astype(float)
    free = result.space.question.device_bytes - result.memory.total_bytes
    # All minimised, so free memory with a minus.
    costs = np.stack([result.step_s, gpus * result.step_s, result.energy_j, -free], axis=1)
    return pareto(costs)


def simulate_fastest(result: SearchResult, max_layouts: int = MOST_SIMULATED) -> dict[int, StepSimulation]:
    """Simulate the fastest admitted layouts, as many as a second allows, the first in any case.

    Returns:
        by place in `admitted`.
    """
    simulations: dict[int, StepSimulation] = {}
    question = result.space.question
    spent = 0
    columns = result.space.columns(result.admitted[:max_layouts])
    for index in range(min(max_layouts, result.admitted.size)):
        pp, number, chunks = (int(columns[name][index]) for name in ("pp", "micro_batches", "chunks"))
        spent += 2 * pp * number * chunks  # actions: forward and backward of each micro-batch on each stage and chunk
        if spent > MOST_ACTIONS and simulations:
            break
        try:
            # A slice of one keeps every column an array.
            layout = result.space.cost_layouts({name: column[index : index + 1] for name, column in columns.items()})
            simulations[index] = simulate(question.subject.workload, question.cluster, layout, question.calibration)
        except LabError:  # a schedule that refuses these numbers stays with its closed form
            continue
    return simulations


PARTS: Final = tuple(field.name for field in fields(Memories) if field.name != "host")
"""Categories on the device, in the order in which they are stacked."""


def rank_memories(space: Space, candidate: LayoutFields) -> list[RankMemory]:
    """Memory of a rank of every stage of one layout."""
    forecast = forecast_ranks(space, candidate)
    if forecast is not None:
        return forecast
    # Not the lab's: the closed form, stage by stage.
    work, layout = space.question.subject.workload, space.cost_layouts(columns_of([candidate]))
    pp = candidate.pp
    stages = stages_of(work, pp, bool(layout.embedding_slots[0]))
    weights = weights_of(work, layout, stages)
    ranks = []
    for stage in range(pp):
        distinct_index = int(stages.order[stage])  # stages with equal layers are merged; rows of `counts`
        num_in_flight = in_flight(layout, stage)
        memory = stage_memory(work, layout, stages.counts[distinct_index], num_in_flight, weights[distinct_index])
        parts = {name: float(np.atleast_1d(getattr(memory, name))[0]) for name in PARTS}
        # A decoder's kinds: embedding, layer, logits; an image model's: blocks, all of them layers.
        layers = stages.counts[distinct_index][1] if work.size is not None else stages.counts[distinct_index].sum()
        ranks.append(RankMemory(stage, int(layers), float(num_in_flight[0]), parts))
    return ranks


def fullest(ranks: list[RankMemory]) -> RankMemory:
    """Find the rank with the most bytes; of equal ones the first."""
    return max(ranks, key=lambda rank: rank.total_bytes)
