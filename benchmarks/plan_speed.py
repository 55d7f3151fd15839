"""How fast the planner is: layouts weighed and timed per second, and the whole answer for a trillion parameters.

    taskset -c 0 python benchmarks/plan_speed.py

One core, medians of `--tries`, in seconds of the processor, so that another load does not count. The goals: 500,000
layouts per second with memory, the answer for 1 T parameters on 3072 GPUs, the fastest layouts simulated, in less than
two seconds; and 100,000 layouts of a catalogue model, whose memory is the forecast's, in less than five where its
traces are kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from dlojz.cost_model import calibration, estimate, memories
from dlojz.hardware import cluster
from dlojz.planner import plan
from dlojz.planner.planned_model import OF_GIANTS, OF_THE_LAB, subject
from dlojz.planner.question import Question
from dlojz.planner.search import search
from dlojz.planner.space import space_of

LAYOUTS = 500_000
OF_THE_CATALOGUE = ("llama_3_8b", (8, 16, 32, 64, 128, 256), 1024)
"""Model, GPUs and batch: some 100,000 layouts."""


def median_s(call: Callable[[], object], tries: int) -> float:
    """Median seconds of the processor that a call takes, after one that is not counted."""
    call()
    taken = []
    for _ in range(tries):
        start = time.process_time()
        call()
        taken.append(time.process_time() - start)
    return statistics.median(taken)


def main(tries: int = 5) -> None:
    """Measure and print as JSON.

    Args:
        tries: measurements of each figure.
    """
    site, parameters, model = cluster("selene"), calibration("a100"), subject("megatron-1t")
    question = Question(model, site, parameters, 3072, (3072,), "bf16", OF_GIANTS, fused_attention=True)
    whole = space_of(question)
    places = np.flatnonzero(whole.codes.reshape(-1) == 0)
    layouts = whole.cost_layouts(whole.columns(np.resize(places, LAYOUTS)))
    timed_s = median_s(lambda: estimate(model.workload, site, layouts, parameters), tries)
    weighed_s = median_s(lambda: memories(model.workload, layouts), tries)
    answer = plan("megatron-1t", "selene", gpus=3072, batch=3072)
    found = {
        "layouts_per_s_with_memory": LAYOUTS / timed_s,
        "layouts_per_s_memory_alone": LAYOUTS / weighed_s,
        "layouts_of_the_space": answer.found.num_layouts,
        "space_s": median_s(lambda: space_of(question), tries),
        "whole_answer_s": median_s(lambda: plan("megatron-1t", "selene", gpus=3072, batch=3072), tries),
        "simulated": len(answer.simulations),
    }
    print(json.dumps(found | searched(tries), indent=2))


def searched(tries: int) -> dict[str, float]:
    """Seconds of a search whose memory is the forecast's: the first, which may have to trace, and one that need not."""
    name, gpus, batch = OF_THE_CATALOGUE
    site, parameters = cluster("jean_zay_a100"), calibration("a100")
    space = space_of(Question(subject(name), site, parameters, batch, gpus, "bf16", OF_THE_LAB, fused_attention=True))
    start = time.process_time()
    made = search(space)
    first_s = time.process_time() - start
    again_s = median_s(lambda: search(space), tries)
    return {"layouts_of_the_catalogue": made.num_layouts, "first_search_s": first_s, "search_s": again_s}


if __name__ == "__main__":
    # argparse, not tyro as the others: this one runs with what the package itself needs.
    parser = argparse.ArgumentParser(description="Layouts weighed and timed per second, and whole answers.")
    parser.add_argument("--tries", type=int, default=5, help="measurements of each figure")
    main(parser.parse_args().tries)
