"""Graph of tensor operators, the ways to shard each on a mesh, and a perceptron to plan.

An operator is written with one letter per index, as in `bik,kj->bij`. Each axis of the mesh is given to one letter:
that index is sharded along that axis, and everything else follows. Inputs and output are cut where they carry the
letter; over a letter that the output lacks was summed, so each device holds a part of the sum, and an all-reduce along
that axis adds the parts up. Heavy operators use every axis of the mesh if they can (computing the same thing everywhere
would cost no communication, but as many times the work); light ones may also be replicated.

The backward pass is derived from the letters: of C = A·B, the gradient of A is C'·B summed over the letters that A
lacks. Activation functions, norms and softmax are part of the operator before them: they follow its sharding, and
communicate nothing.

Source: Zheng et al. 2022 (Alpa, OSDI 22), §4.1, table 3, whose seven rows for a batched matrix product `bik,kj->bij`
are special cases; §4.2 for merged light operators and for a cost of computation of 0, as all algorithms share the work
evenly. The perceptron is that of Alpa's own tests (`tests/shard_parallel/test_mlp.py`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from dlojz.planner.alpa.mesh import DeviceMesh, ShardingSpec, alpa_refused

ELEMENT_BYTES = 4
"""Of fp32."""


class OperatorSharding(NamedTuple):
    """One way to shard an operator.

    Args:
        name: which letter each axis shards, such as `i→0, k→1`; empty if all devices compute the same.
        reduced_axes: axes along which the parts of a sum are added up by an all-reduce.
        message_bytes: of that all-reduce, on each device; 0 if there is none.
        cost: of that all-reduce, in the unit of the mesh.
    """

    name: str
    inputs: tuple[ShardingSpec, ...]
    output: ShardingSpec
    reduced_axes: tuple[int, ...]
    message_bytes: float
    cost: float


@dataclass(frozen=True)
class TensorOperator:
    """Tensor operator: a product of tensors, summed over the letters that the output lacks.

    Args:
        operands: letters of each; one that begins with `+` is added to the product and not multiplied with it.
        output: letters of the result.
        sizes: elements of each letter's index.

    Raises:
        LabError: a letter of the output that no operand has, or an index without size.
    """

    operands: tuple[str, ...]
    output: str
    sizes: Mapping[str, int]
    letters: str = field(init=False)

    def __post_init__(self) -> None:
        # Each letter once, in order of appearance.
        letters = "".join(dict.fromkeys("".join(self.operands).replace("+", "") + self.output))
        object.__setattr__(self, "letters", letters)
        bad = next((letter for letter in letters if self.sizes.get(letter, 0) < 1), None)
        if bad is not None:
            raise alpa_refused("index without size", bad=bad, equation=self.equation, letters=", ".join(letters))

    @classmethod
    def of(cls, equation: str, sizes: Mapping[str, int]) -> TensorOperator:
        """The operator of an equation such as `ik,kj,+j->ij`."""
        inputs, _, output = equation.partition("->")
        return cls(tuple(inputs.split(",")), output, dict(sizes))

    @property
    def equation(self) -> str:
        """Equation: operands, arrow, output."""
        return f"{','.join(self.operands)}->{self.output}"

    @property
    def factors(self) -> tuple[str, ...]:
        """The operands that are multiplied with each other."""
        return tuple(operand for operand in self.operands if not operand.startswith("+"))

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements of the result along each of its dimensions."""
        return tuple(self.sizes[letter] for letter in self.output)

    @property
    def output_bytes(self) -> int:
        """Bytes of the whole result."""
        return math.prod(self.shape) * ELEMENT_BYTES

    @property
    def is_heavy(self) -> bool:
        """Whether devices must share its work: it multiplies and sums."""
        # A product without a sum (a scale, say) is light.
        return len(self.factors) > 1 and bool(set("".join(self.factors)) - set(self.output))

    def algorithms(self, mesh: DeviceMesh) -> tuple[OperatorSharding, ...]:
        """All ways to shard this operator on a mesh.

        Raises:
            LabError: no letter divides by the devices of an axis.
        """
        shardings = [
            self._algorithm(dict(zip(mesh.axes, letters, strict=True)), mesh) for letters in self._assignments(mesh)
        ]
        if not shardings:
            sizes = ", ".join(f"{letter}={self.sizes[letter]}" for letter in self.letters)
            raise alpa_refused(
                "indivisible", equation=self.equation, sizes=sizes, rows=mesh.shape[0], columns=mesh.shape[1]
            )
        return tuple(shardings)

    def _assignments(self, mesh: DeviceMesh) -> list[tuple[str, ...]]:
        """A letter for each axis of the mesh; an empty one for an axis along which all compute the same."""

        def fitting(letters: Sequence[str]) -> list[tuple[str, ...]]:
            # One letter per axis: an axis shards one index.
            return [
                assignment
                for assignment in itertools.product(letters, repeat=len(mesh.axes))
                if self._divides(assignment, mesh)
            ]

        assignments = fitting([*self.letters] if self.is_heavy else ["", *self.letters])
        # A heavy operator whose letters do not divide by every axis uses as many axes as it can.
        if self.is_heavy and not assignments:  # better repeated than not computed at all
            assignments = fitting([*self.letters, ""])
            axis_count = max(sum(map(bool, assignment)) for assignment in assignments)
            # `and axis_count`: where no letter divides by any axis, nothing is left, and the caller refuses.
            assignments = [
                assignment for assignment in assignments if sum(map(bool, assignment)) == axis_count and axis_count
            ]
        return assignments

    def _divides(self, letters: Sequence[str], mesh: DeviceMesh) -> bool:
        return all(
            self.sizes[letter]
            # An index cut along both axes must divide by their product.
            % mesh.size([axis for axis, axis_letter in zip(mesh.axes, letters, strict=True) if axis_letter == letter])
            == 0
            for letter in set(letters) - {""}
        )

    def _algorithm(self, letter_of: Mapping[int, str], mesh: DeviceMesh) -> OperatorSharding:
        output = _spec(self.output, letter_of)
        # Axes over a summed letter: each device holds a part of the sum.
        reduced = tuple(axis for axis, letter in letter_of.items() if letter and letter not in self.output)
        # Each device sends its tile of the result, not the whole.
        message_bytes = output.tile_bytes(self.output_bytes, mesh) if reduced else 0.0
        return OperatorSharding(
            name=", ".join(f"{letter}→{axis}" for axis, letter in letter_of.items() if letter),
            inputs=tuple(_spec(operand.removeprefix("+"), letter_of) for operand in self.operands),
            output=output,
            reduced_axes=reduced,
            message_bytes=message_bytes,
            cost=mesh.all_reduce(message_bytes, reduced) if reduced else 0.0,
        )


def _spec(letters: str, letter_of: Mapping[int, str]) -> ShardingSpec:
    # Per dimension the axes that carry its letter.
    return ShardingSpec(
        tuple(tuple(axis for axis, axis_letter in letter_of.items() if axis_letter == letter) for letter in letters)
    )


Kind = Literal["input", "weight", "forward", "backward", "gradient"]


@dataclass(frozen=True)
class Node:
    """A tensor and the operator that makes it; an input or a weight is made by none.

    Args:
        name: its name, unique in the graph.
        kind: `gradient` is that of a weight, computed once per micro-batch and communicated once per step.
        shape: elements along each dimension.
        operator: None for inputs and weights.
        operands: names of the tensors that the operator reads.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    operator: TensorOperator | None = None
    operands: tuple[str, ...] = ()

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * ELEMENT_BYTES


class OperatorGraph:
    """Operators of one micro-batch, in the order in which they are computed; a tensor is made once and read often."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self._readers: dict[str, list[tuple[str, int]]] = {}
        self.ties: list[tuple[str, str]] = []
        """(gradient, weight): the gradient must have the weight's spec, for the update to communicate nothing."""

    def input(self, name: str, *shape: int) -> str:
        """Add a tensor that is given, and return its name."""
        return self._add(Node(name, "input", shape))

    def weight(self, name: str, *shape: int) -> str:
        """Add a weight, and return its name."""
        return self._add(Node(name, "weight", shape))

    def operator(self, name: str, equation: str, *operands: str, kind: Kind = "forward") -> str:
        """Add an operator, and return the name of its result.

        Args:
            equation: one letter per index, such as `ik,kj,+j->ij` (see `TensorOperator`).
            operands: names of the tensors that it reads, in the order of the equation.

        Raises:
            LabError: an operand that does not exist or whose shape does not fit the equation.
        """
        letters = equation.partition("->")[0].split(",")
        if len(letters) != len(operands):
            raise alpa_refused("operands", equation=equation, count=len(letters), tensors=len(operands))
        sizes: dict[str, int] = {}
        for pattern, operand in zip(letters, operands, strict=True):
            shape = self._node(operand).shape
            plain = pattern.removeprefix("+")
            agree = len(plain) == len(shape) and all(
                # The first operand sets a size, the others must agree.
                sizes.setdefault(letter, size) == size
                for letter, size in zip(plain, shape, strict=True)
            )
            if not agree:
                raise alpa_refused("shapes", operand=operand, equation=equation, shape=shape, pattern=pattern)
        tensor_operator = TensorOperator.of(equation, sizes)
        return self._add(Node(name, kind, tensor_operator.shape, tensor_operator, operands))

    def readers(self, name: str) -> Iterator[tuple[Node, int]]:
        """The nodes that read a tensor, and as which operand."""
        yield from ((self.nodes[reader], position) for reader, position in self._readers.get(name, ()))

    def _node(self, name: str) -> Node:
        if name not in self.nodes:
            names = ", ".join(list(self.nodes)[-6:]) or "—"
            raise alpa_refused("no tensor", name=name, names=names)
        return self.nodes[name]

    def _add(self, node: Node) -> str:
        if node.name in self.nodes:
            raise alpa_refused("second tensor", name=node.name)
        self.nodes[node.name] = node
        for position, operand in enumerate(node.operands):
            self._readers.setdefault(operand, []).append((node.name, position))
        return node.name


def add_backward(graph: OperatorGraph, output: str) -> dict[str, str]:
    """Add the backward pass to a graph: gradients of the weights and of all tensors that depend on them.

    Args:
        graph: completed in place.
        output: the tensor that the loss reads; its gradient is a light operator on it.

    Returns:
        Name of the gradient of each tensor; inputs get none.
    """
    forward = [node for node in graph.nodes.values() if node.kind == "forward" and node.operator]
    weights = [node.name for node in graph.nodes.values() if node.kind == "weight"]
    needs = set(weights)
    for node in forward:
        if needs.intersection(node.operands):
            needs.add(node.name)
    letters = next(node.operator.output for node in forward if node.name == output and node.operator)
    # The loss's own gradient: a light operator on the output, of its shape, so it follows any sharding.
    parts = {output: [graph.operator(f"d{output}", f"{letters}->{letters}", output, kind="backward")]}
    gradients: dict[str, str] = {}
    for node in reversed(forward):  # gradients flow against the order of computation
        if node.name not in parts:
            continue
        output_gradient = gradients[node.name] = _summed(graph, node.name, parts[node.name])
        for position, operand in enumerate(node.operands):
            if operand in needs:
                # A tensor that is read twice gets two parts, summed when its maker's turn comes.
                parts.setdefault(operand, []).append(
                    _gradient(graph, node, position, output_gradient, len(parts.get(operand, [])))
                )
    for name in weights:
        if name in parts:
            gradients[name] = _summed(graph, name, parts[name])
            graph.ties.append((gradients[name], name))
    return gradients


def _gradient(graph: OperatorGraph, node: Node, position: int, output_gradient: str, number: int) -> str:
    """The gradient that one operator sends back to one of its operands."""
    operator = node.operator
    assert operator is not None
    target = node.operands[position]
    letters = operator.operands[position].removeprefix("+")
    factors: list[tuple[str, str]] = []
    # An operand that is added, or the only factor: its gradient is the output's, summed over letters it lacks.
    if operator.operands[position].startswith("+") or len(operator.factors) == 1:
        if letters == operator.output:  # a sum sends its own gradient back
            return output_gradient
    else:
        factors = [
            (factor, operand)
            for index, (factor, operand) in enumerate(zip(operator.operands, node.operands, strict=True))
            if index != position and not factor.startswith("+")
        ]
    return graph.operator(
        f"d{target}" + (f"#{number}" if number else ""),
        # C = A·B: dA = dC · (all other factors), summed over the letters that A lacks.
        ",".join([operator.output, *(factor for factor, _ in factors)]) + "->" + letters,
        output_gradient,
        *(operand for _, operand in factors),
        kind="gradient" if graph.nodes[target].kind == "weight" else "backward",
    )


def _summed(graph: OperatorGraph, name: str, parts: list[str]) -> str:
    """One gradient out of those that several readers of a tensor send back."""
    if len(parts) == 1:
        return parts[0]
    letters = next(operator.output for part in parts if (operator := graph.nodes[part].operator))
    equation = ",".join(f"+{letters}" for _ in parts) + f"->{letters}"  # "+": added, not multiplied
    kind: Kind = "gradient" if graph.nodes[name].kind == "weight" else "backward"
    return graph.operator(f"Σd{name}", equation, *parts, kind=kind)


def mlp(batch: int, width: int, layers: int) -> OperatorGraph:
    """Build the graph of a training step of a perceptron: dense layers with biases, in fp32.

    Args:
        batch, width: samples of a micro-batch; features of every layer, in and out.
        layers: at least 1.

    Raises:
        LabError: no layer.
    """
    if layers < 1:
        raise alpa_refused("no layer", layers=layers)
    graph = OperatorGraph()
    x = graph.input("x", batch, width)
    for layer in range(1, layers + 1):
        weight, bias = graph.weight(f"w{layer}", width, width), graph.weight(f"c{layer}", width)
        x = graph.operator(f"h{layer}", "bk,kj,+j->bj", x, weight, bias)  # (b, k) @ (k, j) + (j)
    add_backward(graph, x)
    return graph
