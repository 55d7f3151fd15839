"""Collectives one can see: each algorithm as a short program, simulated, counted, run on real ranks, timed.

Layer 2. Invariant: there is one program per algorithm; the picture, the formula and the run all come from it. Nothing
here loads torch before a tensor is communicated.

    from dlojz import collectives

    collectives.program("ring_all_reduce", rank=0, size=4)   # what rank 0 does, step by step
    collectives.simulate("ring_all_reduce", 4)               # what every rank holds after each step
    collectives.run("ring_all_reduce", tensor)               # on real ranks, as dist.all_reduce
    collectives.cost_s("ring_all_reduce", 2**20, 4, alpha_s=1e-5, beta_s_per_byte=1e-10)
    collectives.fit(collectives.measure("all_reduce"))       # α and β of these ranks
"""

from __future__ import annotations

from dlojz.collectives.calibration import Calibration, fit
from dlojz.collectives.catalogue import algorithm, names, num_chunks, program
from dlojz.collectives.cost import Link, Terms, cost_s, counted, crossover_bytes, sent_share, terms
from dlojz.collectives.measuring import SIZES_BYTES, Point, measure
from dlojz.collectives.running import run
from dlojz.collectives.simulation import Held, Simulation, Transfer, simulate
from dlojz.collectives.steps import Receive, Send, Step

__all__ = [
    "SIZES_BYTES",
    "Calibration",
    "Held",
    "Link",
    "Point",
    "Receive",
    "Send",
    "Simulation",
    "Step",
    "Terms",
    "Transfer",
    "algorithm",
    "cost_s",
    "counted",
    "crossover_bytes",
    "fit",
    "measure",
    "names",
    "num_chunks",
    "program",
    "run",
    "sent_share",
    "simulate",
    "terms",
]
