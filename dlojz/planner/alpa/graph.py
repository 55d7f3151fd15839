"""Graph of tensor operators: how each may be sharded, and examples to plan.

How the plans of this package show themselves: as a table in a terminal and in a notebook.

Both are the same `dlojz.base.table.Table`.

The ways in which a mesh can share out one operator: its parallel algorithms.

An operator is written with one letter per index, as in `bik,kj->bij`. Each axis of the mesh is given to one letter:
that index is then shared out along that axis, and everything else follows. Inputs and output are cut where they carry
the letter; a letter that the output lacks was summed over, so each device holds a part of the sum, and an all-reduce
along that axis adds the parts up. The table of the paper's matrix product comes out of this one rule.

Heavy operators use every axis of the mesh if they can (computing the same thing everywhere would cost no communication,
but as many times the work); light ones may also be replicated. No torch.

Source: Zheng et al. 2022 (Alpa, OSDI 22), §4.1, table 3, whose seven rows for a batched matrix product `bik,kj->bij`
are special cases; §4.2 for a cost of computation of 0, as all algorithms share the work out evenly.

The graph of operators of a training step, written forward and completed backwards.

Nodes stand in an order in which they can be computed; a tensor is made once and read by any number of operators. The
backward pass is derived from the letters: of C = A·B, the gradient of A is C'·B summed over the letters that A lacks.
Activation functions, norms and softmax are part of the operator before them: they follow its sharding, and communicate
nothing. No torch.

Source: Zheng et al. 2022 (Alpa, OSDI 22), §4.2, which merges light operators into one of their operands likewise.

A graph to try the inner level on: a multi-layer perceptron.

One micro-batch, forward and backward, gradients of all weights. No torch.

Source: Alpa's own tests (`tests/shard_parallel/test_mlp.py`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from dlojz.base.errors import LabError
from dlojz.base.language import say
from dlojz.planner.alpa.mesh import DeviceMesh, ShardingSpec

if TYPE_CHECKING:
    from dlojz.base.table import Table


class ShownAsTable:
    """Base of a plan that has a title, columns and rows."""

    def title(self) -> str:
        """One sentence above the table."""
        raise NotImplementedError

    def columns(self) -> tuple[str, ...]:
        """Headings."""
        raise NotImplementedError

    def rows(self) -> list[tuple[str, ...]]:
        """Lines, as many cells as there are headings."""
        raise NotImplementedError

    def table(self) -> Table:
        """All of it as a table of words."""
        from dlojz.base.table import Table

        return Table(self.columns(), tuple(self.rows()), self.title(), align="l")

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


class OperatorSharding(NamedTuple):
    """One way to share an operator out.

    Args:
        name: which letter each axis shares out, such as `i→0, k→1`; empty if all devices compute the same.
        inputs: how each operand must lie.
        output: how the result lies.
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


class ShardingSpace(NamedTuple):
    """Which algorithms may be chosen.

    Args:
        batch_axis: this axis shares out the letter `b` wherever there is one; Alpa fixes axis 0 on a 2-D mesh.
        mixed: both axes may share out one letter (specs S01R, RS01); the paper's tables have these, Alpa's code by
            default has not (`allow_mixed_mesh_shape`).
        whole_vectors: the all-reduce of a vector is counted whole even where it is cut, as in the closed form of Alpa's
            own test of a multi-layer perceptron, which that test asserts within 1 %.
    """

    batch_axis: int | None = None
    mixed: bool = True
    whole_vectors: bool = False


PAPER = ShardingSpace()


@dataclass(frozen=True)
class TensorOperator:
    """A product of tensors, summed over the letters that the output lacks.

    Args:
        operands: letters of each; one that begins with `+` is added to the product and not multiplied with it.
        output: letters of the result.
        sizes: elements of each letter's index.
        element_bytes: of one element of the result.
        heavy: worth sharing out: by default if it multiplies (two operands without `+`) and sums.
        whole: letters that are never shared out (rows and columns of a kernel or of an image, the width of a head).
        work: FLOPs, if not two per combination of letters (the backward pass of a convolution does the forward's).

    Raises:
        LabError: a letter of the output that no operand has, or an index without size.
    """

    operands: tuple[str, ...]
    output: str
    sizes: Mapping[str, int]
    element_bytes: int = 4
    heavy: bool | None = None
    whole: str = ""
    work: float | None = None
    letters: str = field(init=False)

    def __post_init__(self) -> None:
        letters = "".join(dict.fromkeys("".join(self.operands).replace("+", "") + self.output))
        object.__setattr__(self, "letters", letters)
        bad = next((letter for letter in letters if self.sizes.get(letter, 0) < 1), None)
        if bad is not None:
            raise LabError(
                say(
                    en=f"index {bad!r} of {self.equation} has no size: give a whole number, at least 1, for each of "
                    f"{', '.join(letters)}.",
                    fr=f"l’indice {bad!r} de {self.equation} n’a pas de taille : donnez un entier, au moins 1, pour "
                    f"chacun de {', '.join(letters)}.",
                )
            )

    @classmethod
    def of(cls, equation: str, sizes: Mapping[str, int], **options: object) -> TensorOperator:
        """The operator of an equation such as `ik,kj,+j->ij`."""
        inputs, _, output = equation.partition("->")
        return cls(tuple(inputs.split(",")), output, dict(sizes), **options)  # type: ignore[arg-type]

    @property
    def equation(self) -> str:
        """As it is written: operands, arrow, output."""
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
        return math.prod(self.shape) * self.element_bytes

    @property
    def is_heavy(self) -> bool:
        """Whether devices must share it out rather than repeat it."""
        if self.heavy is not None:
            return self.heavy
        return len(self.factors) > 1 and bool(set("".join(self.factors)) - set(self.output))

    @property
    def flops(self) -> float:
        """Floating-point operations, two per multiply-add; 0 for a light operator."""
        if self.work is not None or not self.is_heavy:
            return self.work or 0.0
        # Rows and columns of a convolution's image are those of its output under other names, and not counted again.
        counted = set(self.output) | (set(self.factors[0]) & set(self.factors[1]))
        counted |= set(self.whole) & set(self.factors[1])
        return 2.0 * math.prod(self.sizes[letter] for letter in counted)

    def algorithms(self, mesh: DeviceMesh, space: ShardingSpace = PAPER) -> tuple[OperatorSharding, ...]:
        """All ways to share this operator out on a mesh.

        Raises:
            LabError: no letter divides by the devices of an axis.
        """
        found = [
            self._algorithm(dict(zip(mesh.axes, letters, strict=True)), mesh, space)
            for letters in self._assignments(mesh, space)
        ]
        if not found:
            raise LabError(
                say(
                    en=f"no index of {self.equation} (sizes {self._sizes_text()}) divides by the devices of the mesh "
                    f"{mesh.shape[0]} × {mesh.shape[1]}: use sizes that divide, or another mesh.",
                    fr=f"aucun indice de {self.equation} (tailles {self._sizes_text()}) n’est divisible par les "
                    f"périphériques du maillage {mesh.shape[0]} × {mesh.shape[1]} : prenez des tailles qui se "
                    "divisent, ou un autre maillage.",
                )
            )
        return tuple(found)

    def _assignments(self, mesh: DeviceMesh, space: ShardingSpace) -> list[tuple[str, ...]]:
        """A letter for each axis of the mesh; an empty one for an axis along which all compute the same."""
        letters = [letter for letter in self.letters if letter not in self.whole]
        choices: list[list[str]] = []
        for axis in mesh.axes:
            forced = axis == space.batch_axis and "b" in letters and self.sizes["b"] % mesh.shape[axis] == 0
            choices.append(["b"] if forced else ([] if self.is_heavy else [""]) + letters)
        fitting = [one for one in itertools.product(*choices) if self._divides(one, mesh)]
        if not space.mixed:
            fitting = [one for one in fitting if len(set(one)) == len(one) or not any(one)]
        if self.is_heavy and not fitting:  # better repeated than not computed at all
            fitting = [one for one in itertools.product(*([*some, ""] for some in choices)) if self._divides(one, mesh)]
            most = max(sum(map(bool, one)) for one in fitting)
            fitting = [one for one in fitting if sum(map(bool, one)) == most and most]
        return fitting

    def _divides(self, letters: Sequence[str], mesh: DeviceMesh) -> bool:
        return all(
            self.sizes[letter]
            % mesh.size([axis for axis, own in zip(mesh.axes, letters, strict=True) if own == letter])
            == 0
            for letter in set(letters) - {""}
        )

    def _algorithm(self, letter_of: Mapping[int, str], mesh: DeviceMesh, space: ShardingSpace) -> OperatorSharding:
        output = _spec(self.output, letter_of)
        reduced = tuple(axis for axis, letter in letter_of.items() if letter and letter not in self.output)
        message_bytes = output.tile_bytes(self.output_bytes, mesh) if reduced else 0.0
        if reduced and space.whole_vectors and len(self.output) == 1:
            message_bytes = float(self.output_bytes)
        return OperatorSharding(
            name=", ".join(f"{letter}→{axis}" for axis, letter in letter_of.items() if letter),
            inputs=tuple(_spec(operand.removeprefix("+"), letter_of) for operand in self.operands),
            output=output,
            reduced_axes=reduced,
            message_bytes=message_bytes,
            cost=mesh.all_reduce(message_bytes, reduced) if reduced else 0.0,
        )

    def _sizes_text(self) -> str:
        return ", ".join(f"{letter}={self.sizes[letter]}" for letter in self.letters if letter not in self.whole)


def _spec(letters: str, letter_of: Mapping[int, str]) -> ShardingSpec:
    return ShardingSpec(tuple(tuple(axis for axis, own in letter_of.items() if own == letter) for letter in letters))


Kind = Literal["input", "weight", "forward", "backward", "gradient"]


@dataclass(frozen=True)
class Node:
    """A tensor and the operator that makes it; an input or a weight is made by none.

    Args:
        name: its name, unique in the graph.
        kind: `gradient` is that of a weight, computed once per micro-batch and communicated once per step.
        shape: elements along each dimension.
        element_bytes: of one element.
        operator: None for inputs and weights.
        operands: names of the tensors that the operator reads.
        spec: how it must lie, if that is not free.
        states: copies of its size that stay in memory beside it (Adam's two moments: 2).
        whole: dimensions that are never cut, of an input or weight.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    element_bytes: int
    operator: TensorOperator | None = None
    operands: tuple[str, ...] = ()
    spec: ShardingSpec | None = None
    states: float = 0.0
    whole: tuple[int, ...] = ()

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.element_bytes

    @property
    def stays(self) -> bool:
        """Whether it is in memory during the whole step."""
        return self.kind in ("input", "weight", "gradient")


class OperatorGraph:
    """Operators of one micro-batch, in the order in which they are computed.

    Args:
        element_bytes: of every element.
        weight_states: copies beside each weight (see `Node.states`).
    """

    def __init__(self, element_bytes: int = 4, weight_states: float = 0.0) -> None:
        self.nodes: dict[str, Node] = {}
        self._readers: dict[str, list[tuple[str, int]]] = {}
        self.ties: list[tuple[str, str]] = []
        """(gradient, weight): the gradient must end as its weight lies, for the update to communicate nothing."""
        self.element_bytes, self.weight_states = element_bytes, weight_states

    def input(self, name: str, *shape: int, spec: ShardingSpec | None = None, whole: tuple[int, ...] = ()) -> str:
        """Add a tensor that is given, and return its name."""
        return self._add(Node(name, "input", shape, self.element_bytes, spec=spec, whole=whole))

    def weight(self, name: str, *shape: int, whole: tuple[int, ...] = ()) -> str:
        """Add a tensor that is learnt, and return its name."""
        return self._add(Node(name, "weight", shape, self.element_bytes, states=self.weight_states, whole=whole))

    def operator(
        self,
        name: str,
        equation: str,
        *operands: str,
        sizes: Mapping[str, int] | None = None,
        whole: str = "",
        heavy: bool | None = None,
        work: float | None = None,
        kind: Kind = "forward",
        spec: ShardingSpec | None = None,
    ) -> str:
        """Add an operator, and return the name of its result.

        Args:
            name: of the result.
            equation: one letter per index, such as `ik,kj,+j->ij` (see `Operator`).
            operands: names of the tensors that it reads, in the order of the equation.
            sizes: of letters that no operand has.
            whole: letters never shared out.
            heavy: whether devices must share it out; by default if it is a product with a sum.
            work: FLOPs, if not two per combination of letters.
            kind: of the node.
            spec: how the result must lie, if that is not free.

        Raises:
            LabError: an operand that does not exist or whose shape does not fit the equation.
        """
        letters = equation.partition("->")[0].split(",")
        if len(letters) != len(operands):
            raise LabError(
                say(
                    en=f"{equation} reads {len(letters)} tensors, but {len(operands)} were given: name one for each.",
                    fr=f"{equation} lit {len(letters)} tenseurs, mais {len(operands)} ont été donnés : nommez-en un "
                    "pour chacun.",
                )
            )
        known = dict(sizes or {})
        for own, operand in zip(letters, operands, strict=True):
            shape = self._node(operand).shape
            plain = own.removeprefix("+")
            agree = len(plain) == len(shape) and all(
                known.setdefault(letter, size) == size for letter, size in zip(plain, shape, strict=True)
            )
            if not agree:
                raise LabError(
                    say(
                        en=f"operand {operand!r} of {equation} has the shape {shape}, which does not fit {own!r}: "
                        "give one letter per dimension, and the same size to the same letter.",
                        fr=f"l’opérande {operand!r} de {equation} a la forme {shape}, qui ne convient pas à {own!r} : "
                        "donnez une lettre par dimension, et la même taille à la même lettre.",
                    )
                )
        made = TensorOperator.of(equation, known, element_bytes=self.element_bytes, whole=whole, heavy=heavy, work=work)
        return self._add(Node(name, kind, made.shape, self.element_bytes, made, operands, spec))

    def readers(self, name: str) -> Iterator[tuple[Node, int]]:
        """The nodes that read a tensor, and as which operand."""
        yield from ((self.nodes[reader], place) for reader, place in self._readers.get(name, ()))

    @property
    def flops(self) -> float:
        """Of all operators."""
        return sum(node.operator.flops for node in self.nodes.values() if node.operator)

    def fixed(self, name: str, spec: ShardingSpec) -> None:
        """Demand that a tensor lies in one way."""
        self.nodes[name] = replace(self._node(name), spec=spec)

    def _node(self, name: str) -> Node:
        if name not in self.nodes:
            known = ", ".join(list(self.nodes)[-6:]) or "—"
            raise LabError(
                say(
                    en=f"the graph has no tensor {name!r}: add it first; the last ones are {known}.",
                    fr=f"le graphe n’a pas de tenseur {name!r} : ajoutez-le d’abord ; les derniers sont {known}.",
                )
            )
        return self.nodes[name]

    def _add(self, node: Node) -> str:
        if node.name in self.nodes:
            raise LabError(
                say(
                    en=f"the graph has a tensor {node.name!r} already: give another name.",
                    fr=f"le graphe a déjà un tenseur {node.name!r} : donnez un autre nom.",
                )
            )
        self.nodes[node.name] = node
        for place, operand in enumerate(node.operands):
            self._readers.setdefault(operand, []).append((node.name, place))
        return node.name


def add_backward(graph: OperatorGraph, output: str, output_gradient: str | None = None) -> dict[str, str]:
    """Add the backward pass to a graph: gradients of all tensors that depend on weights, and of the weights.

    Args:
        graph: completed in place.
        output: the tensor that the loss, or the layer behind, reads.
        output_gradient: its gradient, if the graph has it already; by default a light operator on `output`, as the
            loss is.

    Returns:
        Name of the gradient of each tensor. Inputs get one as well, if they are floating-point activations of a layer
        before: those whose spec is fixed; data gets none.
    """
    forward = [node for node in graph.nodes.values() if node.kind == "forward"]
    needs = {
        node.name for node in graph.nodes.values() if node.kind == "weight" or (node.kind == "input" and node.spec)
    }
    for node in forward:
        if needs.intersection(node.operands):
            needs.add(node.name)
    made = graph.nodes[output].operator
    letters = made.output if made else "b" + "acdefgh"[: len(graph.nodes[output].shape) - 1]
    parts: dict[str, list[str]] = {
        output: [output_gradient or graph.operator(f"d{output}", f"{letters}->{letters}", output, kind="backward")]
    }
    gradients: dict[str, str] = {}
    for node in reversed(forward):
        if node.name not in parts or node.operator is None:
            continue
        own = gradients[node.name] = _summed(graph, node.name, parts[node.name], node.operator.output)
        for place, operand in enumerate(node.operands):
            if operand in needs:
                parts.setdefault(operand, []).append(_gradient(graph, node, place, own, len(parts.get(operand, []))))
    for name in needs:
        if name in parts and name not in gradients:
            gradients[name] = _summed(graph, name, parts[name], _letters_of(graph, parts[name]))
            if graph.nodes[name].kind == "weight":
                graph.ties.append((gradients[name], name))
    return gradients


def _gradient(graph: OperatorGraph, node: Node, place: int, own: str, number: int) -> str:
    """The gradient that one operator sends back to one of its operands."""
    operator = node.operator
    if operator is None:
        raise AssertionError("an input has no operands")
    target = node.operands[place]
    letters = operator.operands[place].removeprefix("+")
    if operator.operands[place].startswith("+") or len(operator.factors) == 1:
        others: list[tuple[str, str]] = []  # a sum sends its own gradient back
        if letters == operator.output:
            return own
    else:
        others = [
            (factor, operand)
            for index, (factor, operand) in enumerate(zip(operator.operands, node.operands, strict=True))
            if index != place and not factor.startswith("+")
        ]
    is_weight = graph.nodes[target].kind == "weight"
    return graph.operator(
        f"d{target}" + (f"#{number}" if number else ""),
        ",".join([operator.output, *(factor for factor, _ in others)]) + "->" + letters,
        own,
        *(operand for _, operand in others),
        sizes=operator.sizes,
        whole=operator.whole,
        heavy=operator.is_heavy and bool(others),
        work=operator.flops if others else None,
        kind="gradient" if is_weight else "backward",
    )


def _letters_of(graph: OperatorGraph, parts: list[str]) -> str:
    """Letters of the dimensions of gradients, from one that an operator makes."""
    made = next((operator for part in parts if (operator := graph.nodes[part].operator)), None)
    return made.output if made else "b" + "acdefgh"[: len(graph.nodes[parts[0]].shape) - 1]


def _summed(graph: OperatorGraph, name: str, parts: list[str], letters: str) -> str:
    """One gradient out of those that several readers of a tensor send back."""
    if len(parts) == 1:
        return parts[0]
    equation = ",".join(f"+{letters}" for _ in parts) + f"->{letters}"
    kind: Kind = "gradient" if graph.nodes[name].kind == "weight" else "backward"
    return graph.operator(f"Σd{name}", equation, *parts, kind=kind)


def mlp(
    batch: int, width: int, layers: int, *, bias: bool = True, element_bytes: int = 4, weight_states: float = 0.0
) -> OperatorGraph:
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
    graph = OperatorGraph(element_bytes, weight_states)
    x = graph.input("x", batch, width)
    for layer in range(1, layers + 1):
        weight = graph.weight(f"w{layer}", width, width)
        if bias:
            x = graph.operator(f"h{layer}", "bk,kj,+j->bj", x, weight, graph.weight(f"c{layer}", width))
        else:
            x = graph.operator(f"h{layer}", "bk,kj->bj", x, weight)
    add_backward(graph, x)
    return graph
