"""Which tensors are in memory at the same time, and how much that makes on one device.

Layer 4. Invariant: inputs, weights (with the optimizer's states) and gradients of weights stay during the whole step;
any other tensor lives from the operator that makes it to the last one that reads it. No torch.

Source: Zheng et al. 2022 (Alpa, OSDI 22), §4.2, for a memory limit in the ILP; its code puts one row per moment, the
sum over the tensors alive then.
"""

from __future__ import annotations

from collections.abc import Mapping

from dlojz.plan.alpa.graph import Graph
from dlojz.plan.alpa.mesh import DeviceMesh
from dlojz.plan.alpa.sharding_spec import ShardingSpec


def alive(graph: Graph) -> dict[str, frozenset[str]]:
    """For the moment at which each operator runs, the tensors in memory, its result included.

    Moments whose tensors are all alive at another moment too are left out: their sum can never be the largest.
    """
    names = list(graph.nodes)
    number = {name: index for index, name in enumerate(names)}
    last = dict(number)
    for node in graph.nodes.values():
        for operand in node.operands:
            last[operand] = max(last[operand], number[node.name])
    staying = {node.name for node in graph.nodes.values() if node.stays}
    sets = {
        name: frozenset(staying | {other for other in names if number[other] <= number[name] <= last[other]})
        for name in names
        if graph.nodes[name].operator is not None
    }
    return {
        name: own
        for name, own in sets.items()
        if not any(own < other or (own == other and number[later] > number[name]) for later, other in sets.items())
    }


def device_bytes(graph: Graph, name: str, spec: ShardingSpec, mesh: DeviceMesh) -> float:
    """What one device holds of a tensor, and of the optimizer's states beside it."""
    node = graph.nodes[name]
    return spec.tile_bytes(node.tensor_bytes, mesh) * (1.0 + node.states)


def peak(graph: Graph, specs: Mapping[str, ShardingSpec], mesh: DeviceMesh) -> tuple[float, str]:
    """Bytes of one device when most is in memory, and the tensor that is being made then."""
    held = {name: device_bytes(graph, name, spec, mesh) for name, spec in specs.items()}
    totals = {name: sum(held[other] for other in own) for name, own in alive(graph).items()}
    if not totals:
        return sum(held.values()), next(iter(graph.nodes), "")
    worst = max(totals, key=lambda name: totals[name])
    return totals[worst], worst


def kept_for_backward(graph: Graph, specs: Mapping[str, ShardingSpec], mesh: DeviceMesh) -> float:
    """Bytes of activations that one device keeps from the forward pass of a micro-batch to its backward pass."""
    kept = {
        operand
        for node in graph.nodes.values()
        if node.kind in ("backward", "gradient")
        for operand in node.operands
        if graph.nodes[operand].kind in ("forward", "input")
    }
    return sum(device_bytes(graph, name, specs[name], mesh) for name in kept)
