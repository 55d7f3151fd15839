"""One action of a pipeline rank: what it computes, for which stage and which micro-batch.

Layer 2. Invariant: an action is a plain tuple; `parse_action(str(action)) == action`, in the spelling that torch's own
pipeline runtime uses (`2F0`, `3I1`, `0W2`, `(1F1;1B0)OVERLAP_F_B`), with three additions for what torch has not: `u` in
front for the second pipe of a bidirectional schedule, `.t` behind for a token slice, `U`, `E`, `L` as kinds.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from dlojz.schema import LabError
from dlojz.text import say

FORWARD = "F"
BACKWARD = "B"
"""Whole backward: gradient of the input and gradient of the weights."""
BACKWARD_INPUT = "I"
"""Backward for the input alone: what the stage before waits for (Qi et al. 2024, arXiv 2401.10241, §2)."""
BACKWARD_WEIGHT = "W"
"""Backward for the weights alone: nobody waits for it but the optimizer."""
OVERLAPPED = "O"
"""A forward and a backward at once, so that each hides the other's communication (DualPipe)."""
UPDATE = "U"
"""Optimizer step of one stage, where a schedule has its own (asynchronous pipelines)."""
EVICT = "E"
"""Send the activations of a micro-batch to a partner that has room (BPipe)."""
LOAD = "L"
"""Fetch them back before the backward that needs them."""

KINDS = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, OVERLAPPED, UPDATE, EVICT, LOAD)
COMPUTES = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)

_PIPES = ("", "u")
_ONE = re.compile(r"(?P<pipe>u?)(?P<stage>\d+)(?P<kind>[FBIWUEL])(?P<micro_batch>\d+)(?:\.(?P<token_slice>\d+))?")
_OVERLAPPED = re.compile(r"\((?P<first>[^;()]+);(?P<second>[^;()]+)\)(?:OVERLAP_F_B)?")


class Action(NamedTuple):
    """One action of one rank; `stage` counts model stages from the input, over all chunks.

    `pipe` tells the two directions of a bidirectional schedule apart (0 down, 1 up), `token_slice` the slices of a
    sequence (TeraPipe); `parts` are the forward and the backward of an overlapped action, whose own stage and
    micro-batch are those of its first part.
    """

    kind: str
    stage: int
    micro_batch: int
    pipe: int = 0
    token_slice: int = 0
    parts: tuple[Action, ...] = ()

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(str(part) for part in self.parts)})OVERLAP_F_B"
        token_slice = f".{self.token_slice}" if self.token_slice else ""
        return f"{_PIPES[self.pipe]}{self.stage}{self.kind}{self.micro_batch}{token_slice}"

    @property
    def elements(self) -> tuple[Action, ...]:
        """The actions that it is made of: its parts if it is overlapped, else itself."""
        return self.parts or (self,)


def overlapped(first: Action, second: Action) -> Action:
    """A forward and a backward that run at once."""
    return Action(OVERLAPPED, first.stage, first.micro_batch, first.pipe, first.token_slice, (first, second))


def parse_action(text: str) -> Action:
    """Read an action as `str` writes it.

    Raises:
        LabError: if the text is no action.
    """
    cell = text.strip()
    both = _OVERLAPPED.fullmatch(cell)
    if both:
        return overlapped(parse_action(both["first"]), parse_action(both["second"]))
    one = _ONE.fullmatch(cell)
    if one is None:
        raise LabError(
            say(
                en=f"{cell[:40]!r} is no action: write stage, kind and micro-batch, as 2F0 (forward), 2B0 (backward), "
                "2I0 and 2W0 (backward for the input, for the weights) or (1F1;1B0)OVERLAP_F_B.",
                fr=f"{cell[:40]!r} n’est pas une action : écrivez étage, genre et micro-batch, comme 2F0 (passe "
                "avant), 2B0 (passe arrière), 2I0 et 2W0 (passe arrière pour l’entrée, pour les poids) ou "
                "(1F1;1B0)OVERLAP_F_B.",
            )
        )
    return Action(
        one["kind"], int(one["stage"]), int(one["micro_batch"]), _PIPES.index(one["pipe"]), int(one["token_slice"] or 0)
    )
