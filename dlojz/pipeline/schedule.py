"""A pipeline schedule: the ordered actions of each rank, and which rank holds which stage.

Layer 2. Invariant: a schedule is data. Each rank executes its list strictly in order; everything else (when, how long,
how much memory) is derived from it. `validity.check` tells whether it can be executed at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from dlojz.pipeline.action import BACKWARD_INPUT, OVERLAPPED, UPDATE, Action
from dlojz.pipeline.graph import Graph, compile_graph


@dataclass(frozen=True)
class Schedule:
    """Ordered actions per rank.

    Attributes:
        name: its name in the catalogue, or "custom".
        orders: actions of each rank, in the order in which it executes them.
        placement: rank of each stage, per pipe: `placement[pipe][stage]`. One pipe, but for bidirectional schedules,
            where each stage lives on two ranks.
        micro_batches: micro-batches of a step, over all pipes.
        token_slices: slices of each sequence (TeraPipe), 1 otherwise.
        barrier: the optimizer waits for every rank (True), or each rank steps on its own (False): tells whether an
            iteration lasts the makespan or the span.
        asynchronous: stages update their weights while micro-batches are in flight.
    """

    name: str
    orders: tuple[tuple[Action, ...], ...]
    placement: tuple[tuple[int, ...], ...]
    micro_batches: int
    token_slices: int = 1
    barrier: bool = True
    asynchronous: bool = False

    @classmethod
    def of(
        cls,
        name: str,
        orders: Iterable[Iterable[Action]],
        placement: Sequence[int] | Sequence[Sequence[int]],
        micro_batches: int,
        *,
        token_slices: int = 1,
        barrier: bool = True,
        asynchronous: bool = False,
    ) -> Schedule:
        """A schedule from any iterables; `placement` may be one list (`rank of stage`) where there is one pipe."""
        first = placement[0] if placement else 0
        pipes = (placement,) if isinstance(first, int) else placement
        return cls(
            name,
            tuple(tuple(order) for order in orders),
            tuple(tuple(pipe) for pipe in pipes),  # type: ignore[arg-type]
            micro_batches,
            token_slices,
            barrier,
            asynchronous,
        )

    def with_orders(self, orders: Iterable[Iterable[Action]]) -> Schedule:
        """The same stages and micro-batches in another order: what a student edits."""
        return replace(self, orders=tuple(tuple(order) for order in orders))

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.orders)

    @property
    def stages(self) -> int:
        """Number of model stages, over all chunks."""
        return len(self.placement[0])

    @property
    def pipes(self) -> int:
        """Directions: 2 for bidirectional schedules, which keep each stage twice."""
        return len(self.placement)

    @property
    def chunks(self) -> int:
        """Stages that the best-filled rank holds, over all pipes."""
        held = [rank for pipe in self.placement for rank in pipe]
        return max(held.count(rank) for rank in range(self.ranks))

    @property
    def splits_backward(self) -> bool:
        """Whether some backward is split into input and weight parts."""
        return any(element.kind == BACKWARD_INPUT for action in self.actions for element in action.elements)

    @property
    def overlaps(self) -> bool:
        """Whether some forward and backward run at once."""
        return any(action.kind == OVERLAPPED for action in self.actions)

    @property
    def updates(self) -> bool:
        """Whether the schedule says itself when each stage updates its weights."""
        return any(action.kind == UPDATE for action in self.actions)

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """All actions, rank after rank: the index into this tuple is the action's number everywhere."""
        return tuple(action for order in self.orders for action in order)

    @cached_property
    def first_of_rank(self) -> tuple[int, ...]:
        """Number of each rank's first action, and the total at the end."""
        firsts = [0]
        for order in self.orders:
            firsts.append(firsts[-1] + len(order))
        return tuple(firsts)

    @cached_property
    def graph(self) -> Graph:
        """What waits for what; compiled once, whatever the costs.

        Raises:
            LabError: if the schedule cannot be executed.
        """
        return compile_graph(self.orders, self.placement, self.micro_batches, self.token_slices)

    def rank_of(self, action: Action) -> int:
        """The rank that holds the stage of an action."""
        return self.placement[action.pipe][action.stage]
