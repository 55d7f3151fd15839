"""The ILP: Alpa's known answers to the digit, every choice tried on small graphs, Viterbi on chains, memory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.planner.alpa.graph import PAPER, OperatorGraph, ShardingSpace, mlp
from dlojz.planner.alpa.intra_operator import Choices, Edge, choices, peak, shard, smallest_peak, solve
from dlojz.planner.alpa.mesh import DeviceMesh

EXACT = 1e-12  # relative: sums of a dozen floats
CODE = ShardingSpace(batch_axis=0, mixed=False)  # as Alpa's code searches by default
CODE_TEST = ShardingSpace(batch_axis=0, mixed=False, whole_vectors=True)


def chain(batch: int, width: int, layers: int) -> OperatorGraph:
    """The forward pass alone of dense layers: a graph without branches."""
    graph = OperatorGraph(4)
    x = graph.input("x", batch, width)
    for layer in range(1, layers + 1):
        x = graph.operator(f"h{layer}", "bk,kj->bj", x, graph.weight(f"w{layer}", width, width))
    return graph


def cost_of(found: Choices, picked: dict[str, int]) -> float:
    """The objective of one full choice, term by term: Σ s·c + Σ sᵀRs."""
    own = sum(float(found.costs[name][index]) for name, index in picked.items())
    return own + sum(float(edge.matrix[picked[edge.maker], picked[edge.reader]]) for edge in found.edges)


@pytest.mark.parametrize("shape", [(4, 1), (1, 4)])
def test_tensor_parallelism_of_an_mlp(shape: tuple[int, int]) -> None:
    """Alpa's test_n_layer_mlp_model_parallel: layers alternate between columns and rows, 5 all-reduces of 6 layers."""
    plan = shard(mlp(32, 256, 6), DeviceMesh(shape))
    axis = shape.index(4)
    assert plan.cost == pytest.approx(245_765.05, rel=EXACT)
    assert plan.cost == pytest.approx(5 * DeviceMesh(shape).all_reduce(32 * 256 * 4, [axis]), rel=EXACT)
    assert [str(plan.specs[f"w{layer}"]) for layer in range(1, 7)] == [f"RS{axis}", f"S{axis}R"] * 3
    assert [one.collective for one in plan.communications] == ["all_reduce"] * 5


@pytest.mark.parametrize("shape", [(4, 1), (1, 4)])
def test_data_parallelism_of_an_mlp(shape: tuple[int, int]) -> None:
    """Alpa's test_n_layer_mlp_data_parallel: Σ AR(4|w|), biases included, and every weight whole everywhere."""
    mesh, axis = DeviceMesh(shape), shape.index(4)
    plan = shard(mlp(256, 32, 6), mesh)
    expected = 6 * (mesh.all_reduce(4 * 32 * 32, [axis]) + mesh.all_reduce(4 * 32, [axis]))
    assert plan.cost == pytest.approx(expected, rel=EXACT)
    assert {str(plan.specs[f"w{layer}"]) for layer in range(1, 7)} == {"RR"}


def test_both_on_a_mesh_of_two_axes() -> None:
    """Alpa's test_n_layer_mlp_2d_mesh, with its own way to count biases: 6 (AR₀(2048) + AR₀(128)) + 5 AR₁(16384)."""
    mesh = DeviceMesh((2, 2), (1, 1), (1, 0.1))
    plan = shard(mlp(256, 32, 6), mesh, space=CODE_TEST)
    expected = 6 * (mesh.all_reduce(2048, [0]) + mesh.all_reduce(128, [0])) + 5 * mesh.all_reduce(16384, [1])
    assert plan.cost == pytest.approx(21_265.17, rel=EXACT)
    assert plan.cost == pytest.approx(expected, rel=EXACT)
    assert [str(plan.specs[f"w{layer}"]) for layer in range(1, 7)] == ["RS1", "S1R"] * 3


def test_what_alpas_closed_form_leaves_out() -> None:
    """Biases cut like their columns cost less (within the 1.7 % of the closed form), specs S01R less again."""
    mesh = DeviceMesh((2, 2), (1, 1), (1, 0.1))
    graph = mlp(256, 32, 6)
    told, code, paper = (shard(graph, mesh, space=space).cost for space in (CODE_TEST, CODE, PAPER))
    assert told > code > paper
    assert code == pytest.approx(20_903.67, rel=EXACT)
    assert paper == pytest.approx(20_701.061, rel=EXACT)
    staged = DeviceMesh((2, 2), (1, 1), (1, 0.1), hierarchical=True)
    assert shard(graph, staged).cost == pytest.approx(15_243.732, rel=EXACT)  # data parallelism by staged all-reduces


def test_the_cost_is_that_of_the_choice_and_gradients_count_once_per_step() -> None:
    mesh, graph = DeviceMesh((1, 4)), mlp(256, 32, 3)
    found = choices(graph, mesh)
    picked = solve(found, graph, mesh)
    assert picked is not None
    plan = shard(graph, mesh)
    assert cost_of(found, picked) == pytest.approx(plan.cost, rel=EXACT)
    assert all(one.per_step for one in plan.communications)
    assert shard(graph, mesh, micro_batches=8).cost == pytest.approx(plan.cost / 8, rel=EXACT)


@pytest.mark.parametrize("batch, width", [(4, 8), (8, 4), (16, 4), (4, 12)])
def test_the_optimum_is_the_best_of_all_choices(batch: int, width: int) -> None:
    mesh, graph = DeviceMesh((1, 2), (0.5, 2.0)), chain(batch, width, 2)
    found = choices(graph, mesh)
    names = list(found.options)
    best = min(
        cost_of(found, dict(zip(names, indices, strict=True)))
        for indices in itertools.product(*(range(len(found.options[name])) for name in names))
    )
    picked = solve(found, graph, mesh)
    assert picked is not None
    assert cost_of(found, picked) == pytest.approx(best, rel=EXACT)


@pytest.mark.parametrize("nodes", [12, 36, 60])
def test_on_a_chain_the_ilp_is_viterbi(nodes: int) -> None:
    generator = np.random.default_rng(nodes)
    options = 7
    costs = {f"n{number}": generator.integers(0, 50, options).astype(float) for number in range(nodes)}
    matrices = generator.integers(0, 50, (nodes - 1, options, options)).astype(float)
    edges = tuple(Edge(f"n{number}", f"n{number + 1}", matrix) for number, matrix in enumerate(matrices))
    found = Choices(dict.fromkeys(costs, ()), costs, edges)
    picked = solve(found, OperatorGraph(), DeviceMesh((1, 2)))
    assert picked is not None
    best = costs["n0"]
    for number, matrix in enumerate(matrices):
        best = (best[:, None] + matrix).min(axis=0) + costs[f"n{number + 1}"]
    assert cost_of(found, picked) == best.min()  # whole numbers


def test_a_limit_of_memory_makes_it_choose_otherwise() -> None:
    mesh, graph = DeviceMesh((1, 4)), mlp(256, 32, 4, weight_states=2)
    free = shard(graph, mesh)
    assert {str(free.specs[f"w{layer}"]) for layer in range(1, 5)} == {"RR"}
    limited = shard(graph, mesh, memory_bytes=0.8 * free.peak_bytes)
    assert limited.cost > free.cost
    assert limited.peak_bytes <= 0.8 * free.peak_bytes < free.peak_bytes


def test_memory_that_nothing_fits_in_is_said_with_what_is_missing() -> None:
    mesh, graph = DeviceMesh((1, 4)), mlp(256, 32, 2)
    needed = smallest_peak(choices(graph, mesh), graph, mesh)
    shard(graph, mesh, memory_bytes=needed * (1 + 1e-6))
    with pytest.raises(LabError, match=r"does not fit on a mesh of 1 × 4: .* has 1.00 KiB, so .* are missing"):
        shard(graph, mesh, memory_bytes=1024)
    with pytest.raises(LabError, match=r"has 0 B, so .* are missing"):
        shard(graph, mesh, memory_bytes=0)


def test_liveness_against_a_count_by_hand() -> None:
    """Of h1 = x·w1, h2 = h1·w2 on one device: when h2 is made, x, w1, w2, h1 and h2 are there."""
    graph, mesh = chain(4, 8, 2), DeviceMesh((1, 1))
    found = choices(graph, mesh)
    specs = {name: options[0].output for name, options in found.options.items()}
    assert peak(graph, specs, mesh) == (4 * (3 * 4 * 8 + 2 * 8 * 8), "h2")


def test_bad_input() -> None:
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
    try:
        use_language("fr")
        assert "Découpe sur 1 × 2 périphériques" in str(plan)
    finally:
        use_language("en")
