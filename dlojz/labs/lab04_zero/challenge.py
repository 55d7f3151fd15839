"""Challenge of lab 04: a plan of gathers, computations and reductions in few messages, under a limit of bytes.

The plan is followed step by step, on sizes alone: nothing is sent. Weights that are gathered and gradients that are
not yet reduced take room; a message is one gather or one reduction, of however many layers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from dlojz.labs.kit.exercise import Said
from dlojz.labs.kit.exercise_texts import Texts
from dlojz.labs.kit.judges import refuse_nothing, shown

TEXTS = Texts(__file__)

SIZES_MIB = (6, 2, 3, 5)
"""Whole weights of each layer; its gradients take as much."""
LIMIT_MIB = 12
TARGET = 7
"""The least there is, by a search over all plans (a test makes it)."""
MOST_STEPS = 200
NAMES = ("gather", "free", "forward", "backward", "reduce")


class _Ranks:
    """What a rank holds whole while a plan is followed.

    Attributes:
        weights, gradients: layers of which it has them whole.
        done: passes that are over: forward of layers 0, 1, … and then backward of …, 1, 0.
        reduced: layers whose gradients are reduced.
    """

    def __init__(self) -> None:
        self.weights: set[int] = set()
        self.gradients: set[int] = set()
        self.reduced: set[int] = set()
        self.done = self.messages = 0

    @property
    def held_mib(self) -> int:
        """Room that whole tensors take."""
        return sum(SIZES_MIB[layer] for layer in (*self.weights, *self.gradients))

    def follow(self, number: int, name: str, layers: tuple[int, ...]) -> None:
        """Do one operation of the plan.

        Raises:
            Wrong: if it breaks a rule.
        """
        step = f"{number}, {name} {list(layers)}"
        where = Said(f"operation {step}", f"opération {step}")
        if name in ("forward", "backward"):
            for layer in layers:
                self._compute(name, layer, where)
        else:
            self._move(name, set(layers), where)
        if self.held_mib > LIMIT_MIB:
            raise TEXTS.wrong(
                "fewest-messages", "above the limit", where=where, held_mib=self.held_mib, LIMIT_MIB=LIMIT_MIB
            )

    def _compute(self, name: str, layer: int, where: Said) -> None:
        num_layers = len(SIZES_MIB)
        expected = ("forward", self.done) if self.done < num_layers else ("backward", 2 * num_layers - 1 - self.done)
        if (name, layer) != expected:
            then = f"{expected[0]} {expected[1]}" if expected[1] >= 0 else ""
            key = "another pass's turn" if then else "all passes are over"
            raise TEXTS.wrong("fewest-messages", key, where=where, **({"then": then} if then else {}))
        if layer not in self.weights:
            raise TEXTS.wrong("fewest-messages", "weights that are not whole", where=where, layer=layer)
        self.done += 1
        if name == "backward":
            self.gradients.add(layer)

    def _move(self, name: str, layers: set[int], where: Said) -> None:
        whole_layers = self.gradients if name == "reduce" else self.weights
        # Gathering what is whole, and freeing or reducing what is not, would count a message or memory wrongly.
        odd = sorted(layers & whole_layers if name == "gather" else layers - whole_layers)
        if odd:
            raise TEXTS.wrong("fewest-messages", name, where=where, layer=odd[0])
        if name == "gather":
            whole_layers |= layers
        else:
            whole_layers -= layers
        # Each operation is one collective for all its layers, and so one message; freeing is local.
        self.messages += name != "free"
        self.reduced |= layers if name == "reduce" else set()


def judge_plan(answer: Callable[[], Any]) -> float:
    """Follow a plan, and return its number of messages.

    Raises:
        Wrong: for a plan that breaks a rule, or that cannot be read.
    """
    operations = answer()
    refuse_nothing(operations)
    if not isinstance(operations, list | tuple):
        raise TEXTS.wrong("fewest-messages", "no list of operations", operations=shown(operations))
    if len(operations) > MOST_STEPS:
        raise TEXTS.wrong("fewest-messages", "too many operations", operations_count=len(operations))
    ranks = _Ranks()
    for number, operation in enumerate(operations, start=1):
        ranks.follow(number, *_read(operation))
    if ranks.done < 2 * len(SIZES_MIB):
        raise TEXTS.wrong("fewest-messages", "passes are missing", done=ranks.done, passes=2 * len(SIZES_MIB))
    if ranks.gradients:
        raise TEXTS.wrong("fewest-messages", "gradients that are not reduced", gradients=sorted(ranks.gradients))
    if ranks.weights:
        raise TEXTS.wrong("fewest-messages", "weights that are still whole", weights=sorted(ranks.weights))
    return float(ranks.messages)


def _read(operation: Any) -> tuple[str, tuple[int, ...]]:
    """Name and layers of an operation."""
    name, layers = "", tuple[int, ...]()
    try:
        name, layer_numbers = operation
        layers = _numbers(layer_numbers)
    except (TypeError, ValueError):
        pass
    valid = name in NAMES and layers and all(0 <= layer < len(SIZES_MIB) for layer in layers)
    if not valid or len(set(layers)) < len(layers):
        raise TEXTS.wrong(
            "fewest-messages",
            "no such operation",
            NAMES=", ".join(NAMES),
            last=len(SIZES_MIB) - 1,
            operation=shown(operation),
        )
    return name, layers


def _numbers(layers: Any) -> tuple[int, ...]:
    """One whole number, or several."""
    try:
        return (operator.index(layers),)
    except TypeError:
        return tuple(operator.index(layer) for layer in layers)


FEWEST_MESSAGES = TEXTS.challenge("fewest-messages", judge_plan, target=TARGET)
