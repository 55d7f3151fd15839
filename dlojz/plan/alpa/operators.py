"""The ways in which a mesh can share out one operator: its parallel algorithms.

An operator is written with one letter per index, as in `bik,kj->bij`. Each axis of the mesh is given to one letter:
that index is then shared out along that axis, and everything else follows. Inputs and output are cut where they carry
the letter; a letter that the output lacks was summed over, so each device holds a part of the sum, and an all-reduce
along that axis adds the parts up. The table of the paper's matrix product comes out of this one rule.

Layer 4. Invariant: heavy operators use every axis of the mesh if they can (computing the same thing everywhere would
cost no communication, but as many times the work); light ones may also be replicated. No torch.

Source: Zheng et al. 2022 (Alpa, OSDI 22), §4.1, table 3, whose seven rows for a batched matrix product
`bik,kj->bij` are special cases; §4.2 for a cost of computation of 0, as all algorithms share the work out evenly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dlojz.plan.alpa.mesh import DeviceMesh
from dlojz.plan.alpa.sharding_spec import ShardingSpec
from dlojz.schema import LabError
from dlojz.text import say


class Algorithm(NamedTuple):
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


class Space(NamedTuple):
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


PAPER = Space()
CODE = Space(batch_axis=0, mixed=False)
CODE_TEST = Space(batch_axis=0, mixed=False, whole_vectors=True)


@dataclass(frozen=True)
class Operator:
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
    def of(cls, equation: str, sizes: Mapping[str, int], **options: object) -> Operator:
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

    def algorithms(self, mesh: DeviceMesh, space: Space = PAPER) -> tuple[Algorithm, ...]:
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

    def _assignments(self, mesh: DeviceMesh, space: Space) -> list[tuple[str, ...]]:
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

    def _algorithm(self, letter_of: Mapping[int, str], mesh: DeviceMesh, space: Space) -> Algorithm:
        output = _spec(self.output, letter_of)
        reduced = tuple(axis for axis, letter in letter_of.items() if letter and letter not in self.output)
        message_bytes = output.tile_bytes(self.output_bytes, mesh) if reduced else 0.0
        if reduced and space.whole_vectors and len(self.output) == 1:
            message_bytes = float(self.output_bytes)
        return Algorithm(
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
