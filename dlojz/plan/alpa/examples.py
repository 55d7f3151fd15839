"""Graphs to try the inner level on: a multi-layer perceptron, and a chain of products.

Layer 4. Invariant: one micro-batch, forward and backward, gradients of all weights. No torch.

Source: Alpa's own tests (`tests/shard_parallel/test_mlp.py`) for the perceptron. Blocks of attention and of
convolution are in `model_layers`.
"""

from __future__ import annotations

from dlojz.plan.alpa.graph import Graph, add_backward
from dlojz.schema import LabError
from dlojz.text import say


def mlp(
    batch: int, width: int, layers: int, *, bias: bool = True, element_bytes: int = 4, weight_states: float = 0.0
) -> Graph:
    """A training step of `layers` dense layers, each `width` to `width`.

    Args:
        batch: samples of a micro-batch.
        width: of every layer, in and out.
        layers: at least 1.
        bias: each layer adds a vector.
        element_bytes: 4 for fp32.
        weight_states: copies of the weights beside them (Adam: 2).

    Raises:
        LabError: no layer.
    """
    if layers < 1:
        raise LabError(
            say(
                en=f"a perceptron has at least one layer, but layers={layers!r} was received: use for example 6.",
                fr=f"un perceptron a au moins une couche, mais layers={layers!r} a été reçu : prenez par exemple 6.",
            )
        )
    graph = Graph(element_bytes, weight_states)
    x = graph.input("x", batch, width)
    for layer in range(1, layers + 1):
        weight = graph.weight(f"w{layer}", width, width)
        if bias:
            x = graph.operator(f"h{layer}", "bk,kj,+j->bj", x, weight, graph.weight(f"c{layer}", width))
        else:
            x = graph.operator(f"h{layer}", "bk,kj->bj", x, weight)
    add_backward(graph, x)
    return graph


def chain(batch: int, width: int, layers: int, element_bytes: int = 4) -> Graph:
    """The forward pass alone of dense layers whose weights lie as each product wants them: a graph without branches.

    The ILP of a chain is solved by Viterbi's algorithm as well, which the tests compare it with.
    """
    graph = Graph(element_bytes)
    x = graph.input("x", batch, width)
    for layer in range(1, layers + 1):
        x = graph.operator(f"h{layer}", "bk,kj->bj", x, graph.weight(f"w{layer}", width, width))
    return graph
