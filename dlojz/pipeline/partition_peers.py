"""How other tools cut a model into stages: DeepSpeed's three methods and torchgpipe's, and how often they are optimal.

Layer 2. Invariant: given the same weights, each gives the bounds that the tool itself gives, ties included; what is
said of their quality is counted against `exact`, never quoted. No torch, none of the tools.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise

from dlojz.pipeline.partition import Partition, Weight, check_stages, check_weights, exact
from dlojz.schema import LabError, one_of
from dlojz.text import say

BLOCKS, STAGES, WEIGHTS = (6, 14), (2, 5), (1, 20)
"""From and to, both included: the random cases of `how_often`."""


def uniform(num_blocks: int, stages: int, allow_empty: bool = False) -> Partition:
    """As many blocks in each stage, whatever they weigh; the first stages get those that are left over.

    Args:
        num_blocks: n, at least 1.
        stages: k.
        allow_empty: give the last stages nothing where n < k, as DeepSpeed does without a word, instead of refusing.

    Returns:
        The partition, every block weighing 1; `.weighed(…)` tells its loads in another unit.

    Raises:
        LabError: if n < k, unless empty stages are allowed.

    Source: DeepSpeed 0.19, `deepspeed.runtime.utils.partition_uniform` (`partition_method='uniform'`).
    """
    check_stages(max(num_blocks, stages) if allow_empty else num_blocks, stages)
    share, more = divmod(num_blocks, stages)
    bounds = tuple(stage * share + min(stage, more) for stage in range(stages + 1))
    return Partition(bounds, (1,) * num_blocks)


def balanced_like_deepspeed(weights: Sequence[Weight], stages: int) -> Partition:
    """DeepSpeed's balanced cut: a dynamic programme that looks for the smallest spread, not the smallest bottleneck.

    For each number of first blocks and of stages one best cut is kept, by max − min of its loads; but the smallest
    spread of the whole may begin with a cut of the first blocks that has not the smallest, so that not even the spread
    is always minimal. Equal spreads: the last stage begins as late as possible.

    Args:
        weights: one per block; added as floats, as DeepSpeed does.
        stages: k.

    Returns:
        The partition, O(k n²).

    Raises:
        LabError: as `exact`.

    Source: DeepSpeed 0.19, `deepspeed.runtime.utils.partition_balanced` (`partition_method='parameters'`, `'type:…'`);
    own writing, equal to it in the tests.
    """
    check_stages(len(weights), stages)
    weights = check_weights(weights)
    blocks = len(weights)
    prefix = [0.0, *accumulate(map(float, weights))]
    heaviest, lightest = [0.0] + [math.inf] * blocks, [math.inf] * (blocks + 1)  # of no stage at all
    starts: list[list[int]] = []
    for stage in range(1, stages + 1):
        kept = [(math.inf, math.inf)] * (blocks + 1)
        chosen = [0] * (blocks + 1)
        for stop in range(stage, blocks + 1):
            best = math.inf
            for start in range(stage - 1, stop if stage > 1 else 1):
                load = prefix[stop] - prefix[start]
                high, low = max(heaviest[start], load), min(lightest[start], load)
                if high - low <= best:
                    best, kept[stop], chosen[stop] = high - low, (high, low), start
        heaviest, lightest = [high for high, _ in kept], [low for _, low in kept]
        starts.append(chosen)
    bounds = [blocks]
    for chosen in reversed(starts):
        bounds.append(chosen[bounds[-1]])
    return Partition(tuple(reversed(bounds)), weights)


def like_torchgpipe(weights: Sequence[Weight], stages: int) -> Partition:
    """torchgpipe's cut: from equal numbers of blocks, one block at a time is moved towards the lightest stage.

    It stops once heaviest ≤ lightest + 1, where the paper's weights lie between 0 and 1. To get there torchgpipe
    subtracts the smallest weight and divides by the range: cheap blocks then weigh almost nothing, however many of
    them a stage takes, and weights that are all alike weigh nothing at all, so that nothing is moved.

    Of several lightest stages torchgpipe takes the first, the paper the one nearest to the heaviest. With many equal
    weights torchgpipe's choice may never come to an end, or give stages that overlap; there, and only there, the
    paper's is followed here.

    Args:
        weights: one per block.
        stages: k.

    Returns:
        The partition, in which stages may be empty; torchgpipe states O(k n³).

    Raises:
        LabError: as `exact`.

    Source: Bárány & Grinberg 2013, "Block partitions of sequences" (arXiv 1308.2452), its algorithm; torchgpipe
    0.0.7, `torchgpipe.balance.blockpartition`, for the scaling and for ties (own writing).
    """
    check_stages(len(weights), stages)
    weights = check_weights(weights)
    least = min(weights)
    span = max(weights) - least
    scaled = [(weight - least) / span if span else 0.0 for weight in weights]
    bounds = _evened(scaled, stages, nearest=False)
    if bounds is None:  # as fractions: the proof that the paper's moves come to an end knows no rounding
        exact_span = Fraction(max(weights)) - Fraction(least)
        fractions = [(Fraction(weight) - Fraction(least)) / exact_span for weight in weights]
        bounds = _evened(fractions, stages, nearest=True)
    if bounds is None:
        raise AssertionError("the paper's algorithm ends, but did not")
    return Partition(bounds, weights)


def _evened(weights: Sequence[float | Fraction], stages: int, nearest: bool) -> tuple[int, ...] | None:
    """Bounds once heaviest ≤ lightest + 1; None if the moves go round in circles or tear stages apart.

    Args:
        weights: between 0 and 1.
        stages: k.
        nearest: of equally light stages take the one nearest to the heaviest, not the first.
    """
    share = len(weights) // stages
    bounds = [*(share * stage for stage in range(stages)), len(weights)]
    donor = heavy = -1
    top: float | Fraction = 0
    seen = set()
    while True:
        loads = [sum(weights[start:stop]) for start, stop in pairwise(bounds)]
        if donor == heavy:  # its load has changed: look again for the heaviest stage, the last one of equals
            top = max(loads)
            heavy = max(stage for stage, load in enumerate(loads) if load == top)
        lightest = [stage for stage, load in enumerate(loads) if load == min(loads)]
        light = min(lightest, key=lambda stage: abs(stage - heavy)) if nearest else lightest[0]
        if top <= loads[light] + 1:
            return tuple(bounds) if bounds == sorted(bounds) else None
        donor = light - 1 if heavy < light else light + 1
        state = (heavy, *bounds)
        if state in seen or min(bounds) < 0 or max(bounds) > len(weights):  # in circles, or off the list
            return None
        seen.add(state)
        if heavy < light:  # the stage before the lightest gives its last block
            bounds[light] -= 1
        else:  # the stage behind it gives its first
            bounds[donor] += 1


def pattern_weights(names: Sequence[str], pattern: str) -> tuple[int, ...]:
    """1 for each block in whose name the pattern is found, in capitals or not, else 0.

    Raises:
        LabError: if the pattern is no regular expression, or is found in no name.

    Source: DeepSpeed 0.19, `PipelineModule._find_layer_type` (`partition_method='type:PATTERN'`).
    """
    listed = ", ".join(dict.fromkeys(names))
    try:
        compiled = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise LabError(
            say(
                en=f"the pattern {pattern!r} is no regular expression ({error}): write for example a part of one of "
                f"{listed}.",
                fr=f"le motif {pattern!r} n’est pas une expression régulière ({error}) : écrivez par exemple une "
                f"partie de l’un de ces noms : {listed}.",
            )
        ) from None
    found = tuple(int(compiled.search(name) is not None) for name in names)
    if not any(found):
        raise LabError(
            say(
                en=f"the pattern {pattern!r} is found in the name of no block: use one that is found in {listed}.",
                fr=f"le motif {pattern!r} ne se trouve dans le nom d’aucun bloc : prenez-en un qui se trouve dans "
                f"{listed}.",
            )
        )
    return found


def by_pattern(names: Sequence[str], pattern: str, stages: int) -> Partition:
    """DeepSpeed's `type:PATTERN`: as many matching blocks in each stage, those that do not match for nothing.

    Args:
        names: class of each block, in order.
        pattern: regular expression, found anywhere in a name, in capitals or not.
        stages: k.

    Raises:
        LabError: as `pattern_weights` and `exact`.

    Source: DeepSpeed 0.19, `PipelineModule._partition_layers`.
    """
    return balanced_like_deepspeed(pattern_weights(names, pattern), stages)


Cut = Callable[[Sequence[Weight], int], Partition]
"""Weights and number of stages to a partition."""

PEERS: Mapping[str, Cut] = {
    "deepspeed": balanced_like_deepspeed,
    "torchgpipe": like_torchgpipe,
    "uniform": lambda weights, stages: uniform(len(weights), stages).weighed(weights),
}


@dataclass(frozen=True)
class HowOften:
    """How often a tool misses the smallest bottleneck over random cases, and by how much at worst."""

    peer: str
    cases: int
    seed: int
    missed: int
    worst_ratio: float
    """Its bottleneck ÷ the smallest one, in the worst case; 1 if it never missed."""
    worst_weights: tuple[Weight, ...]
    worst_stages: int

    @property
    def missed_share(self) -> float:
        """Share of the cases, from 0 to 1."""
        return self.missed / self.cases


def how_often(peer: str, cases: int = 4000, seed: int = 0) -> HowOften:
    """Count how often a tool's cut is not the best, over random lists of blocks.

    6 to 14 blocks of weight 1 to 20, 2 to 5 stages, all drawn evenly; the same seed gives every peer the same cases.

    Args:
        peer: one of `PEERS`.
        cases: at least 1; 4,000 take a second or two.
        seed: of the generator.

    Raises:
        LabError: unknown peer, or fewer than 1 case.
    """
    if peer not in PEERS:
        raise LabError(one_of(say(en="way to cut", fr="méthode de découpage"), peer, PEERS))
    if cases < 1:
        raise LabError(
            say(
                en=f"at least 1 case is needed to count anything, but {cases} was received: use 4000.",
                fr=f"il faut au moins 1 cas pour compter, mais {cases} a été reçu : prenez 4000.",
            )
        )
    generator = random.Random(seed)
    missed, worst = 0, (1.0, (), 0)  # type: tuple[int, tuple[float, tuple[Weight, ...], int]]
    for _ in range(cases):
        weights = tuple(generator.randint(*WEIGHTS) for _ in range(generator.randint(*BLOCKS)))
        stages = generator.randint(*STAGES)
        best, reached = exact(weights, stages).bottleneck, PEERS[peer](weights, stages).bottleneck
        missed += reached > best
        if reached / best > worst[0]:
            worst = (reached / best, weights, stages)
    return HowOften(peer, cases, seed, missed, *worst)
