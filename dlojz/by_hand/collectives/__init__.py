"""Collectives one can see: each algorithm as a short program, simulated, counted, run on real ranks, timed.

There is one program per algorithm; the picture, the formula and the run all come from it. Nothing here loads torch
before a tensor is communicated.

    from dlojz import collectives

    collectives.program("ring_all_reduce", rank=0, size=4)   # what rank 0 does, step by step
    collectives.simulate("ring_all_reduce", 4)               # what every rank holds after each step
    collectives.run("ring_all_reduce", tensor)               # on real ranks, as dist.all_reduce
    collectives.cost_s("ring_all_reduce", 2**20, 4, alpha_s=1e-5, beta_s_per_byte=1e-10)
    collectives.fit(collectives.measure("all_reduce"))       # α and β of these ranks
"""

from __future__ import annotations

from dlojz.by_hand.collectives.algorithm_catalogue import algorithm, names, num_chunks, program
from dlojz.by_hand.collectives.algorithms import CollectiveStep, Receive, Send
from dlojz.by_hand.collectives.cost import AlphaBetaFit, Terms, cost_s, crossover_bytes, fit, terms
from dlojz.by_hand.collectives.running import SIZES_BYTES, TimedMessage, measure, run
from dlojz.by_hand.collectives.simulation import Held, Simulation, Transfer, simulate
from dlojz.hardware.links import Link

__all__ = [
    "SIZES_BYTES",
    "AlphaBetaFit",
    "CollectiveStep",
    "Held",
    "Link",
    "Receive",
    "Send",
    "Simulation",
    "Terms",
    "TimedMessage",
    "Transfer",
    "algorithm",
    "cost_s",
    "crossover_bytes",
    "fit",
    "measure",
    "names",
    "num_chunks",
    "program",
    "run",
    "simulate",
    "terms",
]
