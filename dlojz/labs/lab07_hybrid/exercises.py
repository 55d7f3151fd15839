"""Exercises of lab 07: place of a rank, missing degree, groups, bytes between nodes, a 3D layout, a step, a ring.

The references are `dlojz.config.layout` and, for the bytes of a ring, the flows of `dlojz.prediction.link_traffic`.
The order of groups, and of the ranks within one, does not matter. The gradients of the step, which runs on real ranks,
are compared with those of one process that reads the whole batch through the whole layer, and outputs of attention with
those of the whole sequence; what a wrong way gives is computed in one process, without communication.

Shape suffixes: B batch, N heads, S tokens of one rank, H width of a head.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dlojz.config.layout import AXES, Layout, RankGrid, complete
from dlojz.config.run_config import RunConfig
from dlojz.labs.kit.exercise import NotDone, Said
from dlojz.labs.kit.exercise_texts import Texts, edited_when_called
from dlojz.labs.kit.judges import RANK_CASES, Case, expect_groups, expect_triple, refuse_nothing
from dlojz.labs.kit.rank_judges import OUTPUT, asked_for, gathers, normals
from dlojz.processes.forks import RankAnswer

TEXTS = Texts(__file__)

SIZES = ((2, 4, 2), (2, 2, 2), (3, 2, 4), (2, 3, 1), (5, 1, 3))
"""(dp, pp, tp): the course's picture, this lab's, and degrees that all differ."""


def place_of(rank: int, dp: int, pp: int, tp: int) -> tuple[int, int, int]:
    """Return (pp_rank, dp_rank, tp_rank) of a rank where rank = (pp_rank·dp + dp_rank)·tp + tp_rank.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), §2.2; Megatron-LM, `initialize_model_parallel`.
    """
    # tp is innermost: neighbouring ranks share each layer, and so can sit on one node.
    return rank // tp // dp, rank // tp % dp, rank % tp


def _other_place(case: Case, coordinates: tuple[int, int, int], right: tuple[int, int, int]) -> Said:
    rank, dp, pp, tp = case
    # The formula applied to the answer: shows which rank really lies there.
    back = (coordinates[0] * dp + coordinates[1]) * tp + coordinates[2]
    axes = zip(("pp", "dp", "tp"), coordinates, (pp, dp, tp), strict=True)
    outside = next(((name, coordinate, size) for name, coordinate, size in axes if not 0 <= coordinate < size), None)
    intro = Said(
        f"With dp={dp}, pp={pp}, tp={tp} you put rank {rank} at (pp, dp, tp) = {coordinates}, but ",
        f"Avec dp={dp}, pp={pp}, tp={tp}, vous mettez le rang {rank} en (pp, dp, tp) = {coordinates}, mais ",
    )
    if outside is not None:
        name, coordinate, size = outside
        return TEXTS.sentence(
            "grid-place",
            "a coordinate beyond its degree",
            intro=intro,
            name=name,
            size=size - 1,
            coordinate=coordinate,
            rank=rank,
            right=right,
        )
    return TEXTS.sentence("grid-place", "another rank there", intro=intro, back=back, rank=rank, right=right)


_PLACE = "rank // tp // dp, rank // tp % dp, rank % tp"

PLACE = TEXTS.exercise(
    "grid-place",
    place_of,
    cases=lambda: ((rank, dp, pp, tp) for dp, pp, tp in SIZES for rank in range(dp * pp * tp)),
    read=lambda answer: expect_triple(answer, "(pp_rank, dp_rank, tp_rank)"),
    mistakes={
        "your axes are the other way round": f"{_PLACE} → rank % pp, rank // pp % dp, rank // pp // dp",
        "tp is right, but dp and pp have changed places": f"{_PLACE} → rank // tp % pp, rank // tp // pp, rank % tp",
        "pp is right, but dp and tp have changed places": f"{_PLACE} → rank // dp // tp, rank % dp, rank // dp % tp",
        "the three numbers are right, but in another order": f"{_PLACE} → rank % tp, rank // tp % dp, rank // tp // dp",
        "you take the remainder of the rank itself three times": f"{_PLACE} → rank % pp, rank % dp, rank % tp",
    },
    differs=_other_place,
)

_DEGREES = ((16, None, 4, 2), (8, None, 2, 1), (24, 3, None, 4), (64, 2, 4, None), (8, 2, 2, 2), (4, 4, 1, None))
"""Processes, dp, pp, tp; first the course's picture."""
_REFUSED = ((12, None, 4, 2), (16, 3, None, 2), (8, 2, 2, 4), (16, 2, 2, 2), (4, None, 4, 2))


def missing_degree(
    processes: int, dp: int | None = None, pp: int | None = None, tp: int | None = None
) -> tuple[int, int, int]:
    """Derive the missing one of (dp, pp, tp).

    Raises:
        LabError: where no whole degree would do.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), §3.1: the degrees multiply to the GPUs.
    """
    return complete(processes, dp, pp, tp)


def _grid_told(case: Case) -> str:
    processes, dp, pp, tp = case
    return f"processes={processes}, dp={dp}, pp={pp}, tp={tp}"


def _other_degrees(case: Case, answer: tuple[int, int, int], right: tuple[int, int, int]) -> Said:
    processes, *degrees = case
    grid, product = _grid_told(case), math.prod(answer)
    if sorted(answer) == sorted(right):
        return TEXTS.sentence("grid-degrees", "another order of the degrees", grid=grid, answer=answer)
    fixed = {name: degree for name, degree in zip(("dp", "pp", "tp"), degrees, strict=True) if degree is not None}
    forgotten = [f"{name}={degree}" for name, degree in fixed.items() if product == processes * degree]
    if forgotten and None in degrees:
        return TEXTS.sentence(
            "grid-degrees", "a degree not divided by", grid=grid, answer=answer, product=product, degree=forgotten[0]
        )
    return TEXTS.sentence(
        "grid-degrees", "another product of the degrees", grid=grid, answer=answer, product=product, processes=processes
    )


def _derived(missing: Callable[[int, list[int]], int]) -> Callable[..., tuple[int, ...]]:
    """A wrong way to the missing degree, from the processes and the degrees that are given."""

    def way(processes: int, *degrees: int | None) -> tuple[int, ...]:
        fixed = [degree for degree in degrees if degree is not None]
        return tuple(missing(processes, fixed) if degree is None else degree for degree in degrees)

    return way


def _must_refuse(answer: Callable[..., Any]) -> None:
    for case in _REFUSED:
        try:
            outcome = answer(*case)
        except NotDone:
            raise
        except ValueError:
            continue
        except (ArithmeticError, AssertionError) as error:
            outcome = type(error).__name__
        processes, *degrees = case
        all_given = [degree for degree in degrees if degree is not None]
        reason = Said("no whole degree makes this product", "aucun degré entier ne donne ce produit")
        if len(all_given) == len(degrees):
            product = math.prod(all_given)
            reason = TEXTS.sentence("grid-degrees", "the degrees do not multiply", product=product, processes=processes)
        raise TEXTS.wrong(
            "grid-degrees",
            "no ValueError where no grid is possible",
            case=_grid_told(case),
            reason=reason,
            outcome=outcome,
        )


DEGREES = TEXTS.exercise(
    "grid-degrees",
    missing_degree,
    cases=_DEGREES,
    read=lambda answer: expect_triple(answer, "(dp, pp, tp)"),
    mistakes={
        "you subtract": _derived(lambda processes, fixed: processes - sum(fixed)),
        "you divide by the first of the two given degrees alone": _derived(
            lambda processes, fixed: processes // fixed[0]
        ),
        "you divide by the second of the two given degrees alone": _derived(
            lambda processes, fixed: processes // fixed[-1]
        ),
        "you divide by the sum of the given degrees": _derived(lambda processes, fixed: processes // sum(fixed)),
    },
    differs=_other_degrees,
    then=_must_refuse,
)


Groups = Iterable[Iterable[int]]


def groups_of(axis: str, dp: int, pp: int, tp: int) -> tuple[tuple[int, ...], ...]:
    """Return the groups along an axis: ranks whose places differ only along it.

    Source: Megatron-LM, `megatron/core/parallel_state.py`, `initialize_model_parallel`.
    """
    return RankGrid(dp=dp, pp=pp, tp=tp).groups(axis)


def _consecutive(axis: str, dp: int, pp: int, tp: int) -> Groups:
    size = {"dp": dp, "pp": pp, "tp": tp}[axis]
    return [tuple(range(start, start + size)) for start in range(0, dp * pp * tp, size)]


def _ordered(order: str) -> Callable[..., Groups]:
    return lambda axis, dp, pp, tp: RankGrid(dp=dp, pp=pp, tp=tp, order=order).groups(axis)


def _same_place(axis: str, dp: int, pp: int, tp: int) -> Groups:
    """Ranks with the same place along the axis, where those of a group differ."""
    ranks_by_place: dict[int, list[int]] = {}
    for rank in range(dp * pp * tp):
        ranks_by_place.setdefault(getattr(RankGrid(dp=dp, pp=pp, tp=tp).coordinates(rank), axis), []).append(rank)
    return list(ranks_by_place.values())


def _as_many_as_groups(axis: str, dp: int, pp: int, tp: int) -> Groups:
    """As Megatron writes the pipeline's groups, for every axis: `range(i, world, world // degree)`."""
    step = dp * pp * tp // {"dp": dp, "pp": pp, "tp": tp}[axis]
    return [tuple(range(start, dp * pp * tp, step)) for start in range(step)]


def _other_groups(case: Case, groups: list[tuple[int, ...]], right: list[tuple[int, ...]]) -> Said:
    axis, dp, pp, tp = case
    grid = RankGrid(dp=dp, pp=pp, tp=tp)
    size = grid.size(axis)
    if {len(group) for group in groups} != {size}:
        return TEXTS.sentence(
            "grid-groups",
            "groups of another size",
            degrees=grid.degrees,
            axis=axis,
            size=size,
            right_count=len(right),
            groups_count=len(groups),
            group_size=len(groups[0]),
        )
    rank, peer = next(group for group in groups if group not in right)[:2]
    differ = [name for name in AXES if getattr(grid.coordinates(rank), name) != getattr(grid.coordinates(peer), name)]
    return TEXTS.sentence(
        "grid-groups",
        "two ranks of different places in one group",
        degrees=grid.degrees,
        rank=rank,
        peer=peer,
        axis=axis,
        differ=Said(" and ".join(differ), " et ".join(differ)),
    )


GROUPS = TEXTS.exercise(
    "grid-groups",
    groups_of,
    cases=[(axis, *size) for size in SIZES for axis in ("tp", "dp", "pp")],
    trial=lambda answer, axis, dp, pp, tp: expect_groups(answer(axis, dp, pp, tp), dp * pp * tp),
    mistakes={
        "your groups are consecutive ranks along every axis": _consecutive,
        "the axes dp and pp have changed places": _ordered("tp-pp-dp"),
        "the order of the axes is the other way round": _ordered("pp-dp-tp"),
        "ranks of the same place along the axis": _same_place,
        "you count in steps of": _as_many_as_groups,
    },
    differs=_other_groups,
)


class Asked(NamedTuple):
    """Specification: processes, stages, slices of a layer, samples of a micro-batch and of a step."""

    processes: int
    stages: int
    slices: int
    micro_batch: int
    global_batch: int


CASES = (Asked(8, 2, 2, 2, 16), Asked(16, 4, 2, 4, 64), Asked(24, 2, 4, 1, 18), Asked(8, 4, 1, 8, 128))


def layout_3d(processes: int, stages: int, slices: int, micro_batch: int, global_batch: int) -> Layout:
    """Make the layout: dp is what is left of the processes, micro_batches what is left of the batch.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), §3.1: m = B/(b·d) micro-batches per pipeline.
    """
    dp = processes // (stages * slices)
    return Layout(
        dp=dp,
        pp=stages,
        tp=slices,
        micro_batch=micro_batch,
        micro_batches=global_batch // (micro_batch * dp),
        engine="by_hand",
    )


class Written(NamedTuple):
    """Fields of a layout that an answer must get right."""

    dp: int
    pp: int
    tp: int
    micro_batch: int
    micro_batches: int
    engine: str

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return self.dp * self.micro_batch * self.micro_batches


def _written(answer: Callable[..., Any], *spec: int) -> Written:
    result = answer(*spec)
    refuse_nothing(result)
    layout = result.layout if isinstance(result, RunConfig) else result
    if not isinstance(layout, Layout):
        raise TEXTS.wrong("layout-3d", "no layout", kind=type(result).__name__)
    return Written(*(getattr(layout, name) for name in Written._fields))


def _other_layout(spec: Asked, layout: Written, right: Written) -> Said:
    degrees_differ = layout[:3] != right[:3]
    reason = _why_degrees(layout, right) if degrees_differ else _why_batch(spec, layout, right)
    return TEXTS.sentence("layout-3d", "asked for another layout", spec=spec, reason=reason)


def _why_degrees(layout: Written, right: Written) -> Said:
    if (layout.pp, layout.tp) == (right.tp, right.pp) != (right.pp, right.tp):
        return TEXTS.sentence("layout-3d", "pp and tp are swapped", pp=layout.pp, tp=layout.tp)
    if (layout.pp, layout.tp) != (right.pp, right.tp):
        return TEXTS.sentence("layout-3d", "another pp or tp", pp=layout.pp, tp=layout.tp)
    processes = math.prod(layout[:3])
    return TEXTS.sentence(
        "layout-3d", "another dp", dp=layout.dp, processes=processes, pp=right.pp, tp=right.tp, dp_due=right.dp
    )


def _why_batch(spec: Asked, layout: Written, right: Written) -> Said:
    if layout.micro_batch != spec.micro_batch:
        return TEXTS.sentence(
            "layout-3d", "another micro_batch", micro_batch=layout.micro_batch, micro_batch_due=spec.micro_batch
        )
    if layout.micro_batches == spec.global_batch // spec.micro_batch != right.micro_batches:
        return TEXTS.sentence("layout-3d", "more samples, without the replicas", layout=layout, dp_due=right.dp)
    if layout.micro_batches == right.micro_batches:
        return TEXTS.sentence("layout-3d", "another engine", engine=layout.engine)
    if layout.micro_batches == max(spec.global_batch // (spec.micro_batch * spec.processes), 1):
        return TEXTS.sentence("layout-3d", "fewer samples, divided by all processes", layout=layout)
    return TEXTS.sentence(
        "layout-3d", "another global batch", micro_batches=layout.micro_batches, global_batch=layout.global_batch
    )


LAYOUT_3D = TEXTS.exercise("layout-3d", layout_3d, cases=CASES, trial=_written, differs=_other_layout)


ROUNDS = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
"""How often each chunk goes round, as in lab 03: an all-reduce is a reduce-scatter, then an all-gather."""
BetweenNodes = Callable[[str, int, Sequence[int], int], float]


def between_nodes(collective: str, message_bytes: int, group: Sequence[int], gpus_per_node: int) -> float:
    """Count the bytes that all ranks of one group send to another node for one message.

    Each rank sends `rounds · (n − 1)/n` of the message to the next rank of the ring, the last one to the first.

    Source: Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations", §3.
    """
    return _sent(collective, message_bytes, len(group)) * _crossings(group, gpus_per_node)


def _sent(collective: str, message_bytes: int, size: int) -> float:
    return ROUNDS[collective] * (size - 1) / size * message_bytes


def _crossings(group: Sequence[int], gpus_per_node: int) -> int:
    """Ranks of the ring whose next one is on another node."""
    nodes = [rank // gpus_per_node for rank in group]
    # The list turned by one, as the last rank of a ring sends to the first.
    return sum(node != next_node for node, next_node in zip(nodes, [*nodes[1:], nodes[0]], strict=True))


def _cases() -> Iterator[tuple[str, int, tuple[int, ...], int]]:
    """Some rings come back to a node that they have left."""
    dice = random.Random(7)
    groups = (
        ((0, 1), 8),
        ((0, 8), 8),
        ((0, 4, 8, 12), 8),
        ((1, 3, 5), 4),
        ((0, 1, 2, 3, 4, 5, 6, 7), 4),
        ((5, 11, 17, 23), 4),
        ((0, 8, 1, 9), 8),
        ((9, 2, 10, 3, 4), 4),
        ((2, 3), 1),
    )
    for group, gpus_per_node in groups:
        for collective in ROUNDS:
            yield collective, 840 * dice.randrange(1, 5000), group, gpus_per_node


_RING = (between_nodes, _sent, _crossings)
_BY_A_RANK = "_sent(collective, message_bytes, len(group))"
_BOUNDARIES = "sum(node != next_node for node, next_node in zip(nodes, [*nodes[1:], nodes[0]], strict=True))"

BETWEEN_NODES = TEXTS.exercise(
    "between-nodes",
    between_nodes,
    cases=_cases,
    source=_RING,
    mistakes={
        "you count the nodes less one": f"{_BOUNDARIES} → len({{*nodes}}) - 1",
        "you count one whole message per boundary": f"{_BY_A_RANK} → message_bytes",
        "all that the group sends, if it crosses nodes": f"{_BOUNDARIES} → len(group) * ({_BOUNDARIES} > 0)",
        "you count one rank only": f"{_BOUNDARIES} → ({_BOUNDARIES} > 0)",
        "you count everything that the group sends": f"{_BOUNDARIES} → len(group)",
        "one crossing for a group within a node": f"{_BOUNDARIES} → len({{*nodes}})",
        "you count the nodes that the group touches": f"{_BOUNDARIES} → len({{*nodes}}) * (len({{*nodes}}) > 1)",
        "you count every pair of ranks on different nodes": (
            f"{_BOUNDARIES} → sum(node != peer_node for node, peer_node in itertools.combinations(nodes, 2))"
        ),
        "nodes of a fixed size": tuple(
            TEXTS.mistake(
                "between-nodes",
                "nodes of one size",
                edited_when_called(_RING, f"rank // gpus_per_node → rank // {size}"),
                size=size,
            )
            for size in (8, 4)
        ),
        "you count the messages that stay inside a node": f"{_BOUNDARIES} → len(group) - {_BOUNDARIES}",
        "whole message for the halves of an all-reduce": (
            f"{_BY_A_RANK} → ({_BY_A_RANK} if collective == 'all_reduce' else message_bytes)"
        ),
    },
)


Messages = Mapping[tuple[int, int], int]
PER_NODE = 4
PLACED = ((2, 2, 4, 1), (4, 2, 2, 2), (1, 4, 4, 3))
"""(dp, pp, tp, seed) of 16 ranks on 4 nodes; the numbers of the ranks are drawn by the seed."""
_MIB_OF_AXIS = {"tp": 64, "dp": 8, "pp": 1}


def messages_of(dp: int, pp: int, tp: int, seed: int) -> dict[tuple[int, int], int]:
    """MiB that each rank of a grid sends to others, along rings (tp, dp) and to its neighbours (pp).

    The ranks are numbered at random, so that their order says nothing.
    """
    number = random.Random(seed).sample(range(dp * pp * tp), dp * pp * tp)
    grid = RankGrid(dp=dp, pp=pp, tp=tp)
    mib_by_pair: dict[tuple[int, int], int] = {}
    for axis, mib in _MIB_OF_AXIS.items():
        for group in grid.groups(axis):
            pairs = [*itertools.pairwise(group)]
            # Along pp a message goes each way between neighbours; a ring of one rank sends nothing.
            pairs += [(b, a) for a, b in pairs] if axis == "pp" else [(group[-1], group[0])] * (len(group) > 1)
            for rank, peer in pairs:
                link = number[rank], number[peer]
                mib_by_pair[link] = mib_by_pair.get(link, 0) + mib
    return mib_by_pair


def between_share(messages: Messages, nodes: Iterable[Iterable[int]]) -> float:
    """Percentage of the bytes that goes from one node to another."""
    node = {rank: number for number, ranks in enumerate(nodes) for rank in ranks}
    crossing = sum(mib for (sender, receiver), mib in messages.items() if node[sender] != node[receiver])
    return 100 * crossing / sum(messages.values())


def placed(messages: Messages, nodes: int, per_node: int) -> list[list[int]]:
    """Put ranks on nodes: the two groups that send each other most become one, as long as it fits into a node."""
    groups = [[rank] for rank in range(nodes * per_node)]
    while len(groups) > nodes:
        # Greedy, not optimal: a pair that does not fit into one node is not joined.
        pairs = [pair for pair in itertools.combinations(groups, 2) if len(pair[0]) + len(pair[1]) <= per_node]
        group_a, group_b = max(
            pairs,
            key=lambda pair: sum(messages.get((a, b), 0) + messages.get((b, a), 0) for a in pair[0] for b in pair[1]),
        )
        groups = [group for group in groups if group is not group_a and group is not group_b] + [group_a + group_b]
    return groups


def _judge_placement(answer: Callable[..., Any]) -> float:
    shares = []
    for dp, pp, tp, seed in PLACED:
        messages = messages_of(dp, pp, tp, seed)
        ranks = dp * pp * tp
        nodes = expect_groups(answer(dict(messages), ranks // PER_NODE, PER_NODE), ranks)
        full = next((node for node in nodes if len(node) != PER_NODE), None)
        if full is not None:
            raise TEXTS.wrong(
                "rank-placement", "too many ranks in a node", PER_NODE=PER_NODE, full_count=len(full), full=list(full)
            )
        shares.append(between_share(messages, nodes))
    return round(sum(shares) / len(shares), 1)


PLACEMENT = TEXTS.challenge("rank-placement", _judge_placement, target=7.2)


HIDDEN, WIDTH, SAMPLES = 3, 4, 5
"""Hidden features of one rank, width of the stream, samples of one replica."""
NAMES = ("scale", "w1", "w2", "bias")
Part = dict[str, Tensor]


def make_part(rank: int, dp: int, tp: int, seed: int) -> tuple[Part, Tensor, Tensor]:
    """Make a rank's parameters, samples and targets from the seed."""
    coordinates = RankGrid(dp=dp, tp=tp).coordinates(rank)
    tensors = _whole(dp, tp, seed)
    part = {
        name: value.clone().requires_grad_()
        for name, value in _sliced(tensors, coordinates.tp).items()
        if name in NAMES
    }
    rows = slice(coordinates.dp * SAMPLES, (coordinates.dp + 1) * SAMPLES)
    return part, tensors["x"][rows], tensors["targets"][rows]


def _whole(dp: int, tp: int, seed: int) -> Part:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"scale": (WIDTH,), "w1": (tp * HIDDEN, WIDTH), "w2": (WIDTH, tp * HIDDEN), "bias": (WIDTH,),
              "x": (dp * SAMPLES, WIDTH), "targets": (dp * SAMPLES, WIDTH)}  # fmt: skip
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _sliced(tensors: Mapping[str, Tensor], number: int) -> Part:
    columns = slice(number * HIDDEN, (number + 1) * HIDDEN)
    return {**tensors, "w1": tensors["w1"][columns], "w2": tensors["w2"][:, columns]}


@cache
def gradients(dp: int, tp: int, seed: int) -> list[Part]:
    """Compute in one process what each rank would hold after the step."""
    # Axes over which outputs are added up, gradients of inputs, and gradients; and what these are divided by.
    added, copied, reduced, divided = "tp", "tp", "dp", "dp"
    grid = RankGrid(dp=dp, tp=tp)
    parts = [make_part(rank, dp, tp, seed) for rank in range(grid.world_size)]
    # What enters the layer stands alone, so that its gradient can be added up as `copy` does.
    inputs = [(x * part["scale"]).detach().requires_grad_() for part, x, _ in parts]
    terms = [
        (entering @ part["w1"].T).relu() @ part["w2"].T for entering, (part, _, _) in zip(inputs, parts, strict=True)
    ]
    for rank, (part, _, targets) in enumerate(parts):
        # Detached: an all-reduce adds the others' values, and backward reaches this rank's term alone.
        peer_terms = [terms[peer].detach() for peer in _group(grid, rank, added) if peer != rank]
        y = sum(peer_terms, terms[rank]) + part["bias"]
        ((y - targets) ** 2).mean().backward()
    rank_gradients: list[Part] = []
    for rank, (part, x, _) in enumerate(parts):
        # (samples, WIDTH): the gradient of x · scale, of which every slice of tp has a contribution.
        input_gradient = _sum([_gradient(inputs[peer]) for peer in _group(grid, rank, copied)])
        weight_gradients = {name: _gradient(part[name]) for name in ("w1", "w2", "bias")}
        rank_gradients.append({"scale": (input_gradient * x).sum(0), **weight_gradients})
    averages: list[Part] = []
    for rank in range(grid.world_size):
        group, divisor = _group(grid, rank, reduced), len(_group(grid, rank, divided))
        average = {name: _sum([rank_gradients[peer][name] for peer in group]) / divisor for name in NAMES}
        averages.append({f"gradient of {name}": value for name, value in average.items()})
    return averages


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _sum(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


def _group(grid: RankGrid, rank: int, axis: str) -> tuple[int, ...]:
    if axis == "world":
        return tuple(range(grid.world_size))
    return grid.group_of(rank, axis) if axis else (rank,)


STEP_DEGREES = {4: (2, 2), 3: (3, 1)}
"""(dp, tp) by number of ranks; in the second case the two differ, so that none stands for the other."""
STEP_CASES = ((4, 21), (3, 22))
_LABELS = {f"gradient of {name}": Said(f"the gradient of {name}", f"le gradient de {name}") for name in NAMES}


def _after_step(rank: int, size: int, seed: int) -> Part:
    return gradients(*STEP_DEGREES[size], seed)[rank]


def _axes(added: str = "tp", copied: str = "tp", reduced: str = "dp", divided: str = "dp") -> str:
    """Other axes, `world` or none."""
    return f'"tp", "tp", "dp", "dp" → "{added}", "{copied}", "{reduced}", "{divided}"'


def _trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> tuple[Any, dict[str, Tensor | None]]:
    from dlojz.by_hand.tensor.axis import TensorAxis

    dp, tp = STEP_DEGREES[size]
    grid, axes = RankGrid(dp=dp, tp=tp), {}
    for axis in ("dp", "tp"):
        for group in grid.groups(axis):
            process_group = dist.new_group(list(group))  # every rank makes every group, and keeps its own
            if rank in group:
                axes[axis] = TensorAxis(process_group)
    part, x, targets = make_part(rank, dp, tp, seed)
    answer(part, x, targets, axes["dp"], axes["tp"])
    grads = {f"gradient of {name}": part[name].grad for name in NAMES}
    if not any(grad is not None for grad in grads.values()):  # all zero: the first fault names it
        grads = {f"gradient of {name}": torch.zeros_like(part[name]) for name in NAMES}
    return None, grads


STEP_2D = TEXTS.exercise(
    "hybrid-step",
    _after_step,
    on_ranks=True,
    trial=_trial,
    cases=STEP_CASES,
    labels=_LABELS,
    source=(_after_step, gradients),
    faults={
        "no parameter has a gradient": "/ divisor → / divisor * 0",
        "neither copy nor average": _axes(copied="", reduced="", divided=""),
        "your loss is a sum over samples and features": ".mean().backward() → .sum().backward()",
        "your loss is a sum over the samples": "/ divisor → / divisor * SAMPLES",
        "the gradients are averaged over all ranks": _axes(reduced="world", divided="world"),
        "the two axes are swapped": _axes(added="dp", copied="dp", reduced="tp", divided="tp"),
        "the gradients are averaged over tp": _axes(reduced="tp", divided="tp"),
        "the gradients are summed over dp, but divided by all ranks": _axes(divided="world"),
        "the gradients are summed over dp, but divided by tp.size": _axes(divided="tp"),
        "the gradients are summed over the replicas": _axes(divided=""),
        "no average over the replicas": _axes(reduced="", divided=""),
        "only scale is wrong": _axes(copied=""),
        "terms of the output alone, and no copy": _axes(added="", copied=""),
        "terms of the output alone": _axes(added=""),
        "the bias is added on every rank before the sum over tp": (
            'part["w2"].T for → part["w2"].T + part["bias"] for; terms[rank]) + part["bias"] → terms[rank])'
        ),
        "scale and bias are left out of the average": (
            "in average.items() → in {**average, 'scale': rank_gradients[rank]['scale'], "
            "'bias': rank_gradients[rank]['bias']}.items()"
        ),
    },
)


BATCH, HEADS, TOKENS, HEAD = 2, 3, 4, 5
"""Of attention; the tokens are those of one rank."""


def _queries_keys_values(size: int, seed: int) -> list[Tensor]:
    """Those of the whole sequence, (B, N, size × S, H) each."""
    return normals(seed, *[(BATCH, HEADS, size * TOKENS, HEAD)] * 3)


def _ring_trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> dict[str, Any]:
    shards = (tensor.chunk(size, dim=2)[rank].contiguous() for tensor in _queries_keys_values(size, seed))
    return {OUTPUT: answer(*shards)}


def _attended(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    """What a rank has for its queries over the whole sequence."""
    q_all, k, v = _queries_keys_values(size, seed)
    scores = q_all.chunk(size, dim=2)[rank] @ k.mT / HEAD**0.5
    # exp of all scores, (…, S, N · S), over their sum: the softmax over the keys of all ranks.
    weights = scores.exp()
    return {OUTPUT: weights @ v / weights.sum(-1, keepdim=True)}


_ALL_BLOCKS = "weights @ v / weights.sum(-1, keepdim=True)"
_BY_BLOCK = "sum(s.softmax(-1) @ b for s, b in zip(scores.chunk(size, dim=-1), v.chunk(size, dim=2), strict=True))"


def _inspect_ring(answers: list[RankAnswer], size: int) -> None:
    """The values are right; have keys and values gone round once, and from neighbour to neighbour?"""
    if any(gathers(answer) or asked_for(answer, "all_reduce") for answer in answers):
        raise TEXTS.wrong("ring-attention", "a collective is called")
    numel = sum(asked_for(answers[0], "send", "isend"))
    limit = 2 * (size - 1) * BATCH * HEADS * TOKENS * HEAD
    if numel > limit:
        passes = Said(f"{size - 1} pass{'es' if size > 2 else ''}", f"{size - 1} passage{'s' if size > 2 else ''}")
        raise TEXTS.wrong(
            "ring-attention", "more is sent than the ring needs", size=size, numel=numel, limit=limit, passes=passes
        )


RING_ATTENTION = TEXTS.exercise(
    "ring-attention",
    _attended,
    on_ranks=True,
    trial=_ring_trial,
    cases=RANK_CASES,
    inspect=_inspect_ring,
    faults={
        "keys of the rank's own tokens alone": (
            "k.mT → k.chunk(size, dim=2)[rank].mT; @ v → @ v.chunk(size, dim=2)[rank]"
        ),
        "you take the mean of the blocks' outputs": f"{_ALL_BLOCKS} → {_BY_BLOCK} / size",
        "you add up the outputs of the blocks": f"{_ALL_BLOCKS} → {_BY_BLOCK}",
        "outputs not divided by the sum of exponentials": "/ weights.sum(-1, keepdim=True) →",
        "scores not divided by √H": "/ HEAD**0.5 →",
    },
)
