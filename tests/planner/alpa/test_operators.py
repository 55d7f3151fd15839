"""Parallel algorithms of operators: the paper's table, and each of them run on numbers, part by part."""

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from dlojz.base.errors import LabError
from dlojz.planner.alpa.graph import OperatorGraph, TensorOperator, add_backward
from dlojz.planner.alpa.mesh import DeviceMesh, ShardingSpec

MESH = DeviceMesh((2, 2))
SIZES = {"b": 4, "i": 4, "j": 8, "k": 4}


def test_the_seven_algorithms_of_a_batched_matrix_product() -> None:
    """Table 3 of the paper: name, specs of output and inputs, all-reduce."""
    operator = TensorOperator.of("bik,bkj->bij", SIZES)
    found = {
        one.name: (str(one.output), *map(str, one.inputs), one.reduced_axes, one.message_bytes)
        for one in operator.algorithms(MESH)
    }
    whole = operator.output_bytes
    assert found["i→0, j→1"] == ("RS0S1", "RS0R", "RRS1", (), 0)
    assert found["i→0, k→1"] == ("RS0R", "RS0S1", "RS1R", (1,), whole / 2)
    assert found["j→0, k→1"] == ("RRS0", "RRS1", "RS1S0", (1,), whole / 2)
    assert found["b→0, i→1"] == ("S0S1R", "S0S1R", "S0RR", (), 0)
    assert found["b→0, k→1"] == ("S0RR", "S0RS1", "S0S1R", (1,), whole / 2)
    assert found["i→0, i→1"] == ("RS01R", "RS01R", "RRR", (), 0)
    assert found["k→0, k→1"] == ("RRR", "RRS01", "RS01R", (0, 1), whole)
    assert len(found) == 16  # four letters for each of two axes


@pytest.mark.parametrize("equation", ["ik,kj->ij", "bik,bkj->bij", "ik,kj,+j->ij", "ij->j", "+ij,+ij->ij", "ij,i->ij"])
def test_every_algorithm_computes_the_operator(equation: str) -> None:
    """Each device computes on its parts; the all-reduce adds; what each then holds is its part of the whole result."""
    operator = TensorOperator.of(equation, SIZES)
    generator = np.random.default_rng(0)
    inputs = [
        generator.integers(-9, 9, [SIZES[letter] for letter in operand.removeprefix("+")]).astype(float)
        for operand in operator.operands
    ]
    whole = _computed(operator, inputs)
    for algorithm in operator.algorithms(MESH):
        own = {}
        for device in itertools.product(range(2), range(2)):
            parts = [_part(x, spec, device) for x, spec in zip(inputs, algorithm.inputs, strict=True)]
            first = all(device[axis] == 0 for axis in algorithm.reduced_axes)  # what is added is added once
            kept = [
                x if first or not name.startswith("+") else 0 * x
                for x, name in zip(parts, operator.operands, strict=True)
            ]
            own[device] = _computed(operator, kept)
        for device, held in own.items():
            group = [
                other
                for other in own
                if all(other[axis] == device[axis] for axis in (0, 1) if axis not in algorithm.reduced_axes)
            ]
            total = sum((own[other] for other in group), np.zeros(1)) if algorithm.reduced_axes else held
            assert np.array_equal(total, _part(whole, algorithm.output, device)), algorithm.name


def _computed(operator: TensorOperator, inputs: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    factors = [(name, x) for name, x in zip(operator.operands, inputs, strict=True) if not name.startswith("+")]
    added = [x for name, x in zip(operator.operands, inputs, strict=True) if name.startswith("+")]
    product = 0.0
    if factors:
        equation = ",".join(name for name, _ in factors) + "->" + operator.output
        product = np.einsum(equation, *(x for _, x in factors))
    return sum(added, np.zeros(1)) + product


def _part(x: NDArray[np.float64], spec: ShardingSpec, device: tuple[int, int]) -> NDArray[np.float64]:
    slices = []
    for axes, size in zip(spec.cuts, x.shape, strict=True):
        number, count = 0, 1
        for axis in axes:
            number, count = 2 * number + device[axis], 2 * count
        slices.append(slice(number * size // count, (number + 1) * size // count))
    return x[tuple(slices)]


def test_heavy_operators_are_shared_out_and_light_ones_may_be_repeated() -> None:
    assert all(one.name for one in TensorOperator.of("ik,kj->ij", SIZES).algorithms(MESH))
    assert "" in {one.name for one in TensorOperator.of("+ij,+ij->ij", SIZES).algorithms(MESH)}


def test_an_axis_that_divides_nothing_is_left_and_a_mesh_that_does_not_refused() -> None:
    odd = TensorOperator.of("ik,kj->ij", {"i": 3, "k": 5, "j": 4})
    assert {one.name for one in odd.algorithms(DeviceMesh((2, 4)))} == {"j→0", "j→1"}
    with pytest.raises(LabError, match=r"no index of ik,kj->ij \(sizes i=3, k=5, j=7\) divides by the devices"):
        TensorOperator.of("ik,kj->ij", {"i": 3, "k": 5, "j": 7}).algorithms(DeviceMesh((2, 4)))


def test_the_backward_pass_gives_every_tensor_but_the_data_a_gradient_of_its_shape() -> None:
    graph = OperatorGraph()
    x = graph.input("x", 4, 8)
    for number in range(3):
        x = graph.operator(f"h{number}", "bk,kj->bj", x, graph.weight(f"w{number}", 8, 8))
    gradients = add_backward(graph, x)
    assert set(gradients) == {"h0", "h1", "h2", "w0", "w1", "w2"}
    assert sorted(graph.ties) == [(gradients[name], name) for name in ("w0", "w1", "w2")]
    assert all(graph.nodes[gradients[name]].shape == graph.nodes[name].shape for name in gradients)
    products = [node for node in graph.nodes.values() if node.operator and node.operator.is_heavy]
    assert len(products) == 3 + 2 * 3 - 1, "two for each of the forward pass, but no gradient of the data"


def test_add_backward_sums_gradients_of_a_tensor_with_two_readers() -> None:
    graph = OperatorGraph()
    x = graph.operator("h", "bk,kj->bj", graph.input("x", 4, 8), graph.weight("w", 8, 8))
    y = graph.operator("g", "bk,kj->bj", x, graph.weight("v", 8, 8))
    add_backward(graph, graph.operator("s", "+bj,+bj->bj", x, y))
    assert graph.nodes["Σdh"].operands == ("ds", "dh#1")


def test_faults_of_a_graph_are_told() -> None:
    graph = OperatorGraph()
    graph.input("x", 4, 8)
    with pytest.raises(LabError, match=r"has the shape \(4, 8\), which does not fit 'bkj'"):
        graph.operator("h", "bkj->bk", "x")
    with pytest.raises(LabError, match=r"the graph has no tensor 'y'"):
        graph.operator("h", "bk->bk", "y")
    with pytest.raises(LabError, match=r"reads 2 tensors, but 1 were given"):
        graph.operator("h", "bk,kj->bj", "x")
    with pytest.raises(LabError, match=r"has a tensor 'x' already"):
        graph.input("x", 1)
    with pytest.raises(LabError, match=r"index 'q' of .* has no size"):
        graph.operator("h", "bk->bq", "x")
