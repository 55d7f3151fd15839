"""How fast the planner is: layouts weighed and timed per second, and the whole answer for a trillion parameters.

    taskset -c 0 python benchmarks/plan_speed.py

One core, medians of `--tries`. The goals: 500,000 layouts per second with memory, and the answer for 1 T parameters on
3072 GPUs, the fastest layouts simulated, in less than two seconds.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tyro

from dlojz.hardware import cluster
from dlojz.plan import plan
from dlojz.plan.engines import OF_GIANTS
from dlojz.plan.space import space_of
from dlojz.plan.subject import subject
from dlojz.predict.time import calibration, estimate, memories

LAYOUTS = 500_000


def median_s(call: Callable[[], object], tries: int) -> float:
    """Median seconds of a call, after one that is not counted."""
    call()
    taken = []
    for _ in range(tries):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def main(tries: int = 5) -> None:
    """Measure and print as JSON.

    Args:
        tries: measurements of each figure.
    """
    site, parameters, model = cluster("selene"), calibration("a100"), subject("megatron-1t")

    def space() -> Any:
        return space_of(model, (3072,), 3072, OF_GIANTS, "bf16", True)

    places = np.flatnonzero(space().codes.reshape(-1) == 0)
    layouts = space().layouts(np.resize(places, LAYOUTS))
    timed_s = median_s(lambda: estimate(model.workload, site, layouts, parameters), tries)
    weighed_s = median_s(lambda: memories(model.workload, layouts), tries)
    answer = plan("megatron-1t", "selene", gpus=3072, batch=3072)
    found = {
        "layouts_per_s_with_memory": LAYOUTS / timed_s,
        "layouts_per_s_memory_alone": LAYOUTS / weighed_s,
        "layouts_of_the_space": answer.found.num_layouts,
        "space_s": median_s(space, tries),
        "whole_answer_s": median_s(lambda: plan("megatron-1t", "selene", gpus=3072, batch=3072), tries),
        "simulated": len(answer.simulations),
    }
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    tyro.cli(main)
