"""Lay a model out on devices: `Layout`, and the grid of ranks that follows from its degrees.

A `Layout` that exists is legal; whether an engine of this version runs it is asked of `dlojz.runnable.check_runnable`.

A `RankGrid` has each rank once. Every rank is in exactly one group along each axis; two ranks share a group along an
axis exactly if all their other coordinates are equal. A rank of the tensor axis holds a slice of each layer of its
stage, one of the data axis reads its own samples, one of the pipeline axis holds a stage. `order` names the axes from
the innermost, whose neighbours are neighbouring ranks, to the outermost; ranks of the context axis, which share the
samples of a replica, are just inside the data axis. Ranks fill the nodes in order, so the order decides which axis
stays inside them: `tp-dp-pp` gives rank = (pp_rank·dp + dp_rank)·tp + tp_rank, Megatron-LM's and the lab's (with cp >
1, dp_rank·cp + cp_rank for dp_rank).

Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (arXiv
2104.04473), §3.1 (degrees multiply to the GPUs; tensor parallelism up to the size of a node, pipelines across nodes);
Megatron-LM, `megatron/core/parallel_state.py`, `initialize_model_parallel` (the groups, and `order`); Amazon SageMaker,
"Introduction to Model Parallelism" (one degree is derived from `processes_per_host`).
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from math import prod
from typing import Literal, NamedTuple, Self, get_args

from pydantic import model_validator

from dlojz.base.contract import check_whole
from dlojz.base.errors import LabError
from dlojz.base.language import one_of, say
from dlojz.config.compatibility import LAYOUT, check
from dlojz.config.fields import MAX_DEGREE, LayoutFields, run_refused, run_sentence


class Layout(LayoutFields):
    """Layout of a model on devices: one degree per kind of parallelism.

    DDP is `dp=4`, and `dp=4, engine="by_hand"` the lab's own; ZeRO-2 with DeepSpeed is `dp=4, zero=2,
    engine="deepspeed"`; FSDP2 is `dp=4, zero=3`.

    Raises:
        LabError: if the fields cannot be combined; the sentence says why and what would work.
    """

    @model_validator(mode="after")
    def _combinable(self) -> Self:
        check(LAYOUT, self)
        return self

    def check_processes(self, processes: int) -> None:
        """Refuse a number of processes that the degrees do not multiply to.

        Raises:
            LabError: naming the degrees, the processes received and the `dp` that would work.
        """
        if processes == self.world_size:
            return
        other_degrees = self.tp * self.pp * self.cp
        times = "dp × tp × pp" + (" × cp" if self.cp > 1 else "")
        fits = processes >= other_degrees and processes % other_degrees == 0
        works = (
            f"dp={processes // other_degrees}" if fits else f"{self.world_size} " + say(en="processes", fr="processus")
        )
        raise run_refused(
            "processes", degrees=self.degrees, world_size=self.world_size, times=times, processes=processes, works=works
        )


Axis = Literal["pp", "dp", "tp"]
AXES: tuple[Axis, ...] = get_args(Axis)
GRID_AXES: tuple[str, ...] = ("pp", "dp", "cp", "tp")
"""All axes of a grid, from the outermost in the lab's order."""
DEFAULT_ORDER = "tp-dp-pp"
ORDERS: tuple[str, ...] = (DEFAULT_ORDER, *sorted({"-".join(axes) for axes in permutations(AXES)} - {DEFAULT_ORDER}))
"""All orders of the axes, each from the innermost axis to the outermost; the lab's own first."""
DEFAULT_GPUS_PER_NODE = 4
"""Those of most nodes of Jean Zay (V100, H100); its A100 nodes have 8, as a DGX has."""
MAX_RANKS = 2**14
"""Ranks of the largest grid that is listed rank by rank: the 16,384 GPUs that Llama 3.1 405B was trained on."""


class RankPlace(NamedTuple):
    """Coordinates of a rank along each axis, from 0."""

    pp: int
    dp: int
    tp: int


@dataclass(frozen=True)
class RankGrid:
    """Grid of all ranks of a run, along its axes and over nodes.

    Args:
        dp: data-parallel replicas, at least 1.
        pp: pipeline ranks, at least 1.
        tp: tensor-parallel ranks, at least 1.
        gpus_per_node: ranks of one node, at least 1; the last node may have fewer.
        order: the axes from the innermost to the outermost, one of `ORDERS`.
        cp: context-parallel ranks, at least 1.

    Raises:
        LabError: if a number is no whole number of at least 1, the grid is larger than `MAX_RANKS`, or the order is
            none.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    gpus_per_node: int = DEFAULT_GPUS_PER_NODE
    order: str = DEFAULT_ORDER
    cp: int = 1

    def __post_init__(self) -> None:
        for name in (*GRID_AXES, "gpus_per_node"):
            check_whole(name, getattr(self, name), MAX_DEGREE)
        if self.order not in ORDERS:
            raise LabError(one_of("order", self.order, ORDERS))
        if self.world_size > MAX_RANKS:
            raise run_refused("large grid", degrees=self.degrees, world_size=self.world_size, most=MAX_RANKS)

    @property
    def world_size(self) -> int:
        """Number of ranks: the product of the degrees."""
        return self.dp * self.cp * self.pp * self.tp

    @property
    def degrees(self) -> str:
        """The degrees in words, e.g. `dp=2, pp=4, tp=2`; cp where it exceeds 1."""
        return f"dp={self.dp}, pp={self.pp}, tp={self.tp}" + (f", cp={self.cp}" if self.cp > 1 else "")

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes from the innermost to the outermost."""
        # `dp` stands for both axes that share gradients, of which cp is the inner one.
        return tuple(axis for word in self.order.split("-") for axis in (("cp", "dp") if word == "dp" else (word,)))

    @property
    def named_axes(self) -> tuple[str, ...]:
        """List the axes that a position names: cp only where it exceeds 1."""
        return tuple(axis for axis in GRID_AXES if axis != "cp" or self.cp > 1)

    def size(self, axis: str) -> int:
        """The degree along an axis: how many ranks each of its groups has.

        Raises:
            LabError: if there is no such axis.
        """
        if axis not in GRID_AXES:
            raise LabError(one_of("axis", axis, GRID_AXES))
        degree: int = getattr(self, axis)
        return degree

    def communicates(self, axis: str) -> bool:
        """Whether something is sent along an axis; gradients go along dp and cp together.

        Raises:
            LabError: if there is no such axis.
        """
        return self.size(axis) * (self.cp if axis == "dp" else 1) > 1

    def coordinates(self, rank: int) -> RankPlace:
        """Position of a rank along each axis but the context axis, for which see `position`.

        Raises:
            LabError: if there is no such rank.
        """
        return RankPlace(*(self.position(rank, axis) for axis in AXES))

    def position(self, rank: int, axis: str) -> int:
        """Position of a rank along one axis.

        Raises:
            LabError: if there is no such rank or axis.
        """
        self._check_rank(rank)
        size = self.size(axis)
        # The inverse of `rank_of`: a rank is the sum of position × stride.
        return rank // self._strides[axis] % size

    def position_words(self, rank: int) -> str:
        """Write the position of a rank along `named_axes`, e.g. `3,0,1`.

        Raises:
            LabError: if there is no such rank.
        """
        return ",".join(str(self.position(rank, axis)) for axis in self.named_axes)

    def rank_of(self, *, pp: int = 0, dp: int = 0, tp: int = 0, cp: int = 0) -> int:
        """Rank at these coordinates.

        Raises:
            LabError: if a position is outside its axis.
        """
        positions = {"pp": pp, "dp": dp, "tp": tp, "cp": cp}
        for axis, index in positions.items():
            if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < self.size(axis):
                raise run_refused(
                    "outside the grid", axis=axis, index=index, degrees=self.degrees, most=self.size(axis) - 1
                )
        return sum(positions[axis] * stride for axis, stride in self._strides.items())

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """The groups along an axis: ranks that differ in their position along it alone, in the order of the positions.

        Groups are sorted by their first rank; with a degree of 1 each rank is a group by itself.

        Raises:
            LabError: if there is no such axis.
        """
        size, stride = self.size(axis), self._strides[axis]
        # Those at position 0.
        firsts = (rank for rank in range(self.world_size) if rank // stride % size == 0)
        return tuple(tuple(start + position * stride for position in range(size)) for start in firsts)

    def group_of(self, rank: int, axis: str) -> tuple[int, ...]:
        """The group of a rank along an axis, itself included.

        Raises:
            LabError: if there is no such rank or axis.
        """
        self._check_rank(rank)
        size, stride = self.size(axis), self._strides[axis]
        # The rank of the group at position 0.
        start = rank - rank // stride % size * stride
        return tuple(start + position * stride for position in range(size))

    def replicas_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same weights as a rank, itself included: along the data and the context axis.

        Raises:
            LabError: if there is no such rank.
        """
        # One ring of cp ranks in each of the dp replicas.
        rings = (self.group_of(peer, "cp") for peer in self.group_of(rank, "dp"))
        return tuple(sorted(peer for ring in rings for peer in ring))

    def node_of(self, rank: int) -> int:
        """The node of a rank: nodes are filled one after the other.

        Raises:
            LabError: if there is no such rank.
        """
        self._check_rank(rank)
        return rank // self.gpus_per_node

    @cached_property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node."""
        starts = range(0, self.world_size, self.gpus_per_node)
        return tuple(tuple(range(start, min(start + self.gpus_per_node, self.world_size))) for start in starts)

    def links(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """The groups along an axis that span nodes, so that their communication leaves a node.

        Raises:
            LabError: if there is no such axis.
        """
        # The ranks of a group ascend: it spans nodes if its first and its last are on two.
        return tuple(group for group in self.groups(axis) if self.node_of(group[0]) != self.node_of(group[-1]))

    def inside(self, axis: str) -> bool:
        """Whether every group along an axis stays within one node.

        Raises:
            LabError: if there is no such axis.
        """
        return not self.links(axis)

    @cached_property
    def _strides(self) -> dict[str, int]:
        """Rank difference between neighbours along each axis: the product of the degrees further in."""
        return {axis: prod(self.size(inner) for inner in self.axes[:depth]) for depth, axis in enumerate(self.axes)}

    def _check_rank(self, rank: int) -> None:
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.world_size:
            raise run_refused("no rank", rank=rank, world_size=self.world_size, most=self.world_size - 1)


def complete(
    processes: int, dp: int | None = None, pp: int | None = None, tp: int | None = None, cp: int = 1
) -> tuple[int, int, int]:
    """Derive the degree that is left out: processes = pipeline degree × data degree × tensor degree (× cp).

    With one host, `processes` is SageMaker's `processes_per_host` = pipeline degree × data degree: its data degree
    includes the tensor ranks; `dp` here leaves them out.

    Args:
        processes: of the whole run, at least 1.
        dp: data degree, at least 1, or None to derive it.
        pp: pipeline degree, likewise.
        tp: tensor degree, likewise; at most one of the three is None.
        cp: context degree, at least 1.

    Returns:
        (dp, pp, tp).

    Raises:
        LabError: if two or more are missing, the product is not the number of processes, or the given degrees do not
            divide it; the sentence says what would work.
    """
    degrees = {"dp": dp, "pp": pp, "tp": tp}
    check_whole("processes", processes, MAX_DEGREE)
    for name, degree in degrees.items():
        if degree is not None:
            check_whole(name, degree, MAX_DEGREE)
    missing = [name for name, degree in degrees.items() if degree is None]
    known_degrees = {name: degree for name, degree in degrees.items() if degree is not None}
    if cp > 1:
        check_whole("cp", cp, MAX_DEGREE)
        known_degrees["cp"] = cp
    words, product = (
        ", ".join(f"{name}={degree}" for name, degree in known_degrees.items()),
        prod(known_degrees.values()),
    )
    if len(missing) > 1:
        received = words or say(en="none", fr="aucun")
        raise run_refused(
            "two degrees missing", received=received, processes=processes, first_axis=missing[0], second_axis=missing[1]
        )
    # A remainder, or, where no degree is missing, another product.
    if processes % product or (not missing and processes != product):
        degrees = {**degrees, **known_degrees} if cp > 1 else degrees
        raise LabError(_degrees_refusal(processes, degrees, words, product))
    # At most one is missing: it takes what the others leave.
    all_degrees = {**known_degrees, **dict.fromkeys(missing, processes // product)}
    return all_degrees["dp"], all_degrees["pp"], all_degrees["tp"]


def _degrees_refusal(processes: int, degrees: dict[str, int | None], words: str, product: int) -> str:
    """Write why degrees do not multiply to a number of processes, and what would."""
    if None in degrees.values():
        # The multiples of the product below and above; −(−a // b) rounds up.
        below, above = processes // product * product, -(-processes // product) * product
        works = say(en=" or ", fr=" ou ").join(str(number) for number in (below, above) if number)
        return run_sentence("no multiple of processes", words=words, product=product, processes=processes, works=works)
    times = " × ".join(degrees)
    # For each degree the product of all others.
    other_products = {name: product // (degree or 1) for name, degree in degrees.items()}
    fits = next(
        (
            f"{name}={processes // other_product}"
            for name, other_product in other_products.items()
            if processes % other_product == 0
        ),
        None,
    )
    works = say(en=" or ", fr=" ou ").join(filter(None, (fits, f"{product} " + say(en="processes", fr="processus"))))
    return run_sentence("other product", words=words, product=product, times=times, processes=processes, works=works)
