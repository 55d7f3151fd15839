"""The search: bytes and seconds of every layout that a run can have, the Pareto front, and the best ones played out.

Layer 4. Invariant: nothing is guessed away: a layout is timed unless its space, its bytes or the time allowed refuse
it, and the order of what is left is the cost model's; pruning saves time, never a layout (the tests compare with a
search that prunes nothing).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dlojz.hardware import Cluster
from dlojz.plan.space import CODE, REASONS, Integers, Space
from dlojz.predict.time import Calibration, Memories, Parts, Simulation, memories, simulate, step_parts
from dlojz.predict.time.layouts import Reals
from dlojz.schema import LabError

MOST_ACTIONS: Final = 200_000
"""Of all simulated schedules together: forwards and backwards of micro-batches on all stages; about a second."""
MOST_SIMULATED: Final = 12


@dataclass(frozen=True, eq=False)
class Found:
    """What a search found.

    Attributes:
        space: that was searched.
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

    def counts(self) -> dict[str, int]:
        """How many layouts each reason refuses."""
        found = np.bincount(self.codes.reshape(-1), minlength=len(REASONS))
        return {name: int(found[code]) for name, code in CODE.items() if code > CODE["same"]}

    @property
    def num_layouts(self) -> int:
        """Layouts of the space, those that say the same as a plainer one not counted."""
        return int(np.count_nonzero(self.codes != CODE["same"]))


def search(space: Space, cluster: Cluster, calibration: Calibration, *, step_limit_s: float = np.inf) -> Found:
    """Bytes and seconds of a whole space.

    Args:
        space: what may be.
        cluster: on what.
        calibration: of its GPUs.
        step_limit_s: a step that takes longer does not end within the time allowed.
    """
    codes = space.codes.copy()
    flat = codes.reshape(-1)
    places = np.flatnonzero(flat == 0)
    layouts = space.layouts(places)
    held = memories(space.subject.workload, layouts)
    total = held.total_bytes
    too_much = total > cluster.gpu.device.memory_bytes
    here = np.minimum(cluster.gpus_per_node, space.columns(places)["gpus"])
    on_host = held.host * here > cluster.host_memory_bytes
    flat[places[on_host]] = CODE["host"]
    flat[places[too_much]] = CODE["memory"]
    kept = ~(too_much | on_host)
    parts = step_parts(space.subject.workload, cluster, layouts[kept], calibration)
    slow = parts.step_s > step_limit_s
    flat[places[kept][slow]] = CODE["hours"]
    order = np.argsort(np.where(slow, np.inf, parts.step_s), kind="stable")[: int((~slow).sum())]
    found = Parts(**{one.name: getattr(parts, one.name)[order] for one in fields(Parts)})
    memory = Memories(**{one.name: getattr(held, one.name)[kept][order] for one in fields(Memories)})
    admitted = places[kept][order]
    gpus = space.columns(admitted)["gpus"]
    heavy = places[too_much | on_host]
    fastest_s = float(parts.step_s.min(initial=np.inf))
    energy = energy_j(cluster, gpus, found)
    return Found(space, codes, admitted, found, memory, energy, heavy, total[too_much | on_host], fastest_s)


def energy_j(cluster: Cluster, gpus: Integers, parts: Parts) -> Reals:
    """Joules that the GPUs draw in a step: idle power throughout, the rest while they compute.

    E = n·(t·idle + t_computing·(TDP − idle)). That GPUs which wait for messages draw idle power is our choice of a
    lower bound; with t_computing = t it is BLOOM's account (`dlojz.predict.time.bill`).
    """
    computing = parts.forward + parts.backward + parts.recompute + parts.optimizer
    return gpus * (parts.step_s * cluster.gpu.idle_w + computing * (cluster.gpu.tdp_w - cluster.gpu.idle_w))


def pareto(costs: NDArray[np.float64]) -> Integers:
    """Rows that no other one beats: as good in everything and better in something; in order of the first column.

    Args:
        costs: rows × objectives, the less the better. Of equal rows the first stays.
    """
    order = np.lexsort(costs.T[::-1])
    left, front = costs[order], []
    while order.size:
        front.append(int(order[0]))
        worse = (left >= left[0]).all(axis=1)  # the first of what is left is beaten by nothing that is left
        order, left = order[~worse], left[~worse]
    return np.array(front, np.int64)


def front_of(found: Found, device_bytes: float) -> Integers:
    """Admitted layouts (their places in `admitted`) on the front of step time, GPU-hours, energy and free memory."""
    gpus = found.gpus.astype(float)
    free = device_bytes - found.memory.total_bytes
    costs = np.stack([found.step_s, gpus * found.step_s, found.energy_j, -free], axis=1)
    return pareto(costs)


def played_out(
    found: Found, cluster: Cluster, calibration: Calibration, most: int = MOST_SIMULATED
) -> dict[int, Simulation]:
    """The fastest admitted layouts by event simulation, as many as a second allows, the first in any case.

    Returns:
        by place in `admitted`.
    """
    made: dict[int, Simulation] = {}
    spent = 0
    columns = found.space.columns(found.admitted[:most])
    for place in range(min(most, found.admitted.size)):
        pp, number, chunks = (int(columns[name][place]) for name in ("pp", "micro_batches", "chunks"))
        spent += 2 * pp * number * chunks
        if spent > MOST_ACTIONS and made:
            break
        try:
            layout = found.space.layouts(found.admitted[place : place + 1])
            made[place] = simulate(found.space.subject.workload, cluster, layout, calibration)
        except LabError:  # a schedule that refuses these numbers stays with its closed form
            continue
    return made
