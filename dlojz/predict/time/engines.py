"""What a training library does that its layout does not say.

Layer 3. Invariant: facts of the software, each with its source, not fitted numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from dlojz.predict.time.layouts import ENGINES, Integers, Layouts, Reals


@dataclass(frozen=True)
class Engine:
    """A library's habits.

    Attributes:
        sliced: whether tensor-parallel ranks send a pipeline boundary in parts (scatter/gather).
        hidden_tensor: share of the tensor-parallel messages that run beside products.
        gather_interfaces: network interfaces of a node that gathering weights (ZeRO-3) can use; 0: all.
        blocking: whether a stage waits for its neighbour's message before it computes.
        reduces_each: whether gradients are reduced after every micro-batch with ZeRO-2, and weights gathered again for
            each micro-batch of a pipeline with ZeRO-3.
        selective_share: with selective checkpointing, share of the layer's forward that is computed again; 0:
            attention's core alone.
        source: where it says so.
    """

    sliced: bool
    hidden_tensor: float
    gather_interfaces: int
    blocking: bool
    selective_share: float
    reduces_each: bool
    source: str


HABITS: Final[dict[str, Engine]] = {
    "megatron": Engine(
        True, 0.0, 0, True, 0.0, False, "Narayanan et al. 2021, §4.1: scatter/gather; collectives not overlapped"
    ),
    "megatron-deepspeed": Engine(
        True,
        0.0,
        1,
        True,
        0.0,
        True,
        "deepspeed/runtime/pipe/engine.py: is_pipe_partitioned = is_model_parallel; with a pipeline it refuses ZeRO-2 "
        "and 3, so that how it gathers and reduces then is deepspeed's",
    ),
    "deepspeed": Engine(
        True,
        0.0,
        1,
        True,
        0.0,
        True,
        "ZeRO-3 gathers one parameter at a time over all ranks: one ring, one interface per node",
    ),
    "megatron-core": Engine(
        True, 0.5, 0, False, 0.0, False, "Megatron-LM README: --tp-comm-overlap, --overlap-p2p-communication"
    ),
    "torchtitan": Engine(
        True,
        0.0,
        0,
        True,
        0.5,
        False,
        "Liang et al. 2024 (arXiv 2410.06511), §2.1 vanilla TP, §2.3 every second product kept",
    ),
    "nemo": Engine(True, 0.5, 0, False, 0.0, False, "as megatron-core"),
    "llama": Engine(True, 0.0, 0, False, 0.0, False, "Llama 3 (arXiv 2407.21783), §3.3.2: asynchronous point-to-point"),
}


def habit(layouts: Layouts, name: str) -> Reals:
    """One habit of each layout's engine, as a number."""
    of_engine = np.array([float(getattr(HABITS[engine], name)) for engine in ENGINES])
    return of_engine[layouts.engine]


def unlimited(interfaces: Reals) -> Reals:
    """Interfaces, where 0 stands for all."""
    return np.where(interfaces > 0, interfaces, np.inf)


__all__ = ["HABITS", "Engine", "Integers", "habit", "unlimited"]
