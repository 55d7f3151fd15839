"""The ILP: Alpa's known answers to the digit, every choice tried on small graphs, Viterbi on chains."""

import itertools

import numpy as np
import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.hardware.links import Link
from dlojz.planner.alpa.graph import OperatorGraph, mlp
from dlojz.planner.alpa.intra_operator import Choices, Edge, choices, shard, solve
from dlojz.planner.alpa.mesh import DeviceMesh

EXACT = 1e-12  # relative: sums of a dozen floats


def chain(batch: int, width: int, layers: int) -> OperatorGraph:
    """The forward pass alone of dense layers: a graph without branches."""
    graph = OperatorGraph()
    x = graph.input("x", batch, width)
    for layer in range(1, layers + 1):
        x = graph.operator(f"h{layer}", "bk,kj->bj", x, graph.weight(f"w{layer}", width, width))
    return graph


def cost_of(found: Choices, picked: dict[str, int]) -> float:
    """The objective of one full choice, term by term: Σ s·c + Σ sᵀRs."""
    own = sum(float(found.costs[name][index]) for name, index in picked.items())
    return own + sum(float(edge.matrix[picked[edge.maker], picked[edge.reader]]) for edge in found.edges)


@pytest.mark.parametrize("shape", [(4, 1), (1, 4)])
def test_shard_finds_tensor_parallelism_of_an_mlp(shape: tuple[int, int]) -> None:
    """Alpa's test_n_layer_mlp_model_parallel: layers alternate between columns and rows, 5 all-reduces of 6 layers."""
    plan = shard(mlp(32, 256, 6), DeviceMesh(shape))
    axis = shape.index(4)
    assert plan.cost == pytest.approx(245_765.05, rel=EXACT)
    assert plan.cost == pytest.approx(5 * DeviceMesh(shape).all_reduce(32 * 256 * 4, [axis]), rel=EXACT)
    assert [str(plan.algorithms[f"w{layer}"].output) for layer in range(1, 7)] == [f"RS{axis}", f"S{axis}R"] * 3
    assert [one.collective for one in plan.communications] == ["all_reduce"] * 5


@pytest.mark.parametrize("shape", [(4, 1), (1, 4)])
def test_shard_finds_data_parallelism_of_an_mlp(shape: tuple[int, int]) -> None:
    """Alpa's test_n_layer_mlp_data_parallel: Σ AR(4|w|), biases included, and every weight whole everywhere."""
    mesh, axis = DeviceMesh(shape), shape.index(4)
    plan = shard(mlp(256, 32, 6), mesh)
    expected = 6 * (mesh.all_reduce(4 * 32 * 32, [axis]) + mesh.all_reduce(4 * 32, [axis]))
    assert plan.cost == pytest.approx(expected, rel=EXACT)
    assert {str(plan.algorithms[f"w{layer}"].output) for layer in range(1, 7)} == {"RR"}


def test_both_on_a_mesh_of_two_axes() -> None:
    """Alpa's test_n_layer_mlp_2d_mesh asserts 21 265.17, with biases counted whole and without specs S01R."""
    mesh = DeviceMesh((2, 2), (Link(1, 1), Link(1, 10)))
    plan = shard(mlp(256, 32, 6), mesh)
    alpa = 6 * (mesh.all_reduce(2048, [0]) + mesh.all_reduce(128, [0])) + 5 * mesh.all_reduce(16384, [1])
    assert alpa == pytest.approx(21_265.17, rel=EXACT)
    assert plan.cost == pytest.approx(20_701.061, rel=EXACT)


def test_the_cost_is_that_of_the_choice_and_gradients_count_once_per_step() -> None:
    mesh, graph = DeviceMesh((1, 4)), mlp(256, 32, 3)
    found = choices(graph, mesh)
    picked = solve(found)
    plan = shard(graph, mesh)
    assert cost_of(found, picked) == pytest.approx(plan.cost, rel=EXACT)
    assert {graph.nodes[one.tensor].kind for one in plan.communications} == {"gradient"}
    assert shard(graph, mesh, micro_batches=8).cost == pytest.approx(plan.cost / 8, rel=EXACT)


@pytest.mark.parametrize("batch, width", [(4, 8), (8, 4), (16, 4), (4, 12)])
def test_the_optimum_is_the_best_of_all_choices(batch: int, width: int) -> None:
    mesh, graph = DeviceMesh((1, 2), (Link(0.5, 1.0), Link(2.0, 1.0))), chain(batch, width, 2)
    found = choices(graph, mesh)
    names = list(found.options)
    best = min(
        cost_of(found, dict(zip(names, indices, strict=True)))
        for indices in itertools.product(*(range(len(found.options[name])) for name in names))
    )
    picked = solve(found)
    assert cost_of(found, picked) == pytest.approx(best, rel=EXACT)


@pytest.mark.parametrize("nodes", [12, 36, 60])
def test_solve_of_the_ilp_on_a_chain_is_viterbi(nodes: int) -> None:
    generator = np.random.default_rng(nodes)
    options = 7
    costs = {f"n{number}": generator.integers(0, 50, options).astype(float) for number in range(nodes)}
    matrices = generator.integers(0, 50, (nodes - 1, options, options)).astype(float)
    edges = tuple(Edge(f"n{number}", f"n{number + 1}", matrix) for number, matrix in enumerate(matrices))
    found = Choices(dict.fromkeys(costs, ()), costs, edges)
    picked = solve(found)
    best = costs["n0"]
    for number, matrix in enumerate(matrices):
        best = (best[:, None] + matrix).min(axis=0) + costs[f"n{number + 1}"]
    assert cost_of(found, picked) == best.min()  # whole numbers


def test_shard_and_mlp_refuse_bad_input() -> None:
    with pytest.raises(LabError, match=r"at least one micro-batch, but micro_batches=0"):
        shard(mlp(4, 4, 1), DeviceMesh((1, 2)), micro_batches=0)
    with pytest.raises(LabError, match=r"at least one layer, but layers=0"):
        mlp(4, 4, 0)


def test_a_plan_shows_itself_in_both_languages() -> None:
    graph = OperatorGraph()
    graph.operator("<h>", "bk,kj->bj", graph.input("x", 8, 8), graph.weight("w", 8, 8))
    plan = shard(graph, DeviceMesh((1, 2)))
    assert "Sharding on 1 × 2 devices" in str(plan)
    assert "&lt;h&gt;" in plan._repr_html_()
    use_language("fr")
    assert "Découpe sur 1 × 2 périphériques" in str(plan)
