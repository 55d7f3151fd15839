"""The graph of operators of a training step, written forward and completed backwards.

Layer 4. Invariant: nodes stand in an order in which they can be computed; a tensor is made once and read by any number
of operators. The backward pass is derived from the letters: of C = A·B, the gradient of A is C'·B summed over the
letters that A lacks. Activation functions, norms and softmax are part of the operator before them: they follow its
sharding, and communicate nothing. No torch.

Source: Zheng et al. 2022 (Alpa, OSDI 22), §4.2, which merges light operators into one of their operands likewise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from dlojz.plan.alpa.operators import Operator
from dlojz.plan.alpa.sharding_spec import ShardingSpec
from dlojz.schema import LabError
from dlojz.text import say

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
    operator: Operator | None = None
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


class Graph:
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
        made = Operator.of(equation, known, element_bytes=self.element_bytes, whole=whole, heavy=heavy, work=work)
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


def add_backward(graph: Graph, output: str, output_gradient: str | None = None) -> dict[str, str]:
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


def _gradient(graph: Graph, node: Node, place: int, own: str, number: int) -> str:
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


def _letters_of(graph: Graph, parts: list[str]) -> str:
    """Letters of the dimensions of gradients, from one that an operator makes."""
    made = next((operator for part in parts if (operator := graph.nodes[part].operator)), None)
    return made.output if made else "b" + "acdefgh"[: len(graph.nodes[parts[0]].shape) - 1]


def _summed(graph: Graph, name: str, parts: list[str], letters: str) -> str:
    """One gradient out of those that several readers of a tensor send back."""
    if len(parts) == 1:
        return parts[0]
    equation = ",".join(f"+{letters}" for _ in parts) + f"->{letters}"
    kind: Kind = "gradient" if graph.nodes[name].kind == "weight" else "backward"
    return graph.operator(f"Σd{name}", equation, *parts, kind=kind)
