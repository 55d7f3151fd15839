"""Exercises of lab 03 on the ring and the data: ring all-reduce, its time, α and β, the sampler, the learning rate.

A ring is judged by the sum on every rank and by what was sent for it. The fit minimises relative gaps, so that short
messages count as much as long ones. For the sampler no order is prescribed: ranks must read disjoint, equal shares,
in another order in every epoch, and the same when asked again.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any

from dlojz.base.language import say
from dlojz.hardware.links import weighted_line
from dlojz.labs.kit.exercise import Mistake, Said, Wrong
from dlojz.labs.kit.exercise_texts import Texts
from dlojz.labs.kit.judges import reader
from dlojz.labs.kit.rank_judges import same
from dlojz.labs.kit.sandbox import hashes_of_another_process
from dlojz.processes.forks import RankAnswer

if TYPE_CHECKING:
    from torch import Tensor

TEXTS = Texts(__file__)

Pair = tuple[float, float]
CHUNK = 3
"""Elements of a chunk: more than one, so that a chunk is not taken for an element."""
_NAME = "sum"
_IN_PLACE = Said(
    "x.chunk(size) gives a tuple of views: write into a view, by chunks[i].add_(…) or chunks[i].copy_(…)",
    "x.chunk(size) donne un tuple de vues : écrivez dans une vue, par chunks[i].add_(…) ou chunks[i].copy_(…)",
)


def _input(rank: int, size: int, seed: int) -> Tensor:
    import torch

    return torch.randn(CHUNK * size, generator=torch.Generator().manual_seed(1000 * seed + rank))


def _sum(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    import torch

    # (N, CHUNK · N) summed over the ranks: what one process has that knows all inputs.
    return {_NAME: torch.stack([_input(peer, size, seed) for peer in range(size)]).sum(0)}


def _trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> tuple[Any, dict[str, Any]]:
    x = _input(rank, size, seed)
    try:
        returned = answer(x)
    except TypeError as error:
        if "item assignment" in str(error):
            error.args = (say(en=f"{error} ({_IN_PLACE.en})", fr=f"{error} ({_IN_PLACE.fr})"),)
        raise
    value = x if returned is None else returned
    return {"in place": same(x, _sum(rank, size, seed)[_NAME])}, {_NAME: value}


def ring(
    x: Tensor,
    *,
    gather: bool = True,
    add_again: bool = False,
    turn: bool = True,
    steps_less: int = 0,
    first_offset: int = 1,
    upwards: bool = False,
) -> Tensor:
    """The ring all-reduce of a vector, in place; the options spoil it in the usual ways.

    Source: Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations", §3.
    """
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    chunks, received = x.chunk(size), torch.empty(CHUNK)

    def pass_on(sent_index: int, received_index: int, add: bool) -> None:
        # Who: rank to its right neighbour. What: one chunk, (CHUNK,). How much: 4 · CHUNK bytes.
        sending = dist.isend(chunks[sent_index % size].clone(), (rank + 1) % size)
        dist.recv(received, (rank - 1) % size)
        sending.wait()  # type: ignore[union-attr]
        chunks[received_index % size].copy_(chunks[received_index % size] + received if add else received)

    for step in range(size - 1 - steps_less):
        # In step s rank r sends chunk r - s and adds what it receives to chunk r - s - 1, which it sends next.
        back = step if turn else 0
        pass_on(rank - back, rank - back - 1, True)
    for step in range(size - 1 - steps_less if gather else 0):
        # After the reduce-scatter rank r holds the whole sum of chunk r + 1: from there on chunks replace those held.
        back = (-step if upwards else step) if turn else 0
        pass_on(rank + first_offset - back, rank + first_offset - back - 1, add_again)
    return x


def _inspect(answers: list[RankAnswer], size: int) -> None:
    """The sum is right everywhere; was it a ring?"""
    for answer in answers:
        library = [call["op"] for call in answer.calls if call["op"] not in ("send", "recv")]
        numel = sum(call["numel"] for call in answer.calls if call["op"] == "send")
        if library or not numel:
            raise Wrong(
                en=f"The sum is right, but it is torch's own {(library or ['all_reduce'])[0]} that made it: use "
                "dist.isend and dist.recv only.",
                fr=f"La somme est juste, mais c’est {(library or ['all_reduce'])[0]}, de torch, qui l’a faite : "
                "n’utilisez que dist.isend et dist.recv.",
            )
        # Elements that a ring sends: one chunk in each of its 2 (p - 1) steps.
        limit = 2 * (size - 1) * CHUNK
        if numel > limit:
            raise Wrong(
                en=f"The sum is right, but with {size} ranks, rank {answer.rank} sends {numel} elements for a "
                f"tensor of {CHUNK * size}; a ring sends 2 (size − 1) chunks, that is {limit}. Send one chunk per "
                "step, not the whole tensor.",
                fr=f"La somme est juste, mais avec {size} rangs, le rang {answer.rank} envoie {numel} éléments pour "
                f"un tenseur de {CHUNK * size} ; un anneau envoie 2 (size − 1) morceaux, soit {limit}. Envoyez un "
                "morceau par étape, et non tout le tenseur.",
            )
        if not answer.value["in place"]:
            raise Wrong(
                en="The tensor that you return holds the sum, but x does not: it must be replaced in place, as "
                "all_reduce does. Work on x.chunk(size), which are views of x, not on a copy (clone, cat, stack).",
                fr="Le tenseur que vous renvoyez contient la somme, mais pas x : il doit être remplacé en place, comme "
                "le fait all_reduce. Travaillez sur x.chunk(size), qui sont des vues de x, et non sur une copie "
                "(clone, cat, stack).",
            )


RING_ALL_REDUCE = TEXTS.exercise(
    "ring-all-reduce",
    _sum,
    on_ranks=True,
    trial=_trial,
    local=lambda rank, size, seed: {_NAME: _input(rank, size, seed)},
    labels={_NAME: Said("the sum", "la somme")},
    mistakes={
        "the reduce-scatter alone": lambda x: ring(x, gather=False),
        "the all-gather still adds what arrives": lambda x: ring(x, add_again=True),
        "you send the same chunk in every step": lambda x: ring(x, turn=False),
        "the all-gather starts with the wrong chunk": lambda x: ring(x, first_offset=0),
        "the all-gather goes up in the chunks": lambda x: ring(x, upwards=True),
        "the mean in place of the sum": lambda x: ring(x) / (len(x) // CHUNK),
    },
    inspect=_inspect,
)


def ring_seconds(message_bytes: float, size: int, alpha_s: float, beta_s_per_byte: float) -> float:
    """Time of a ring all-reduce: 2 (p − 1) steps, each α plus β times one chunk of n / p bytes.

    Source: Hockney 1994 (α–β); Thakur, Rabenseifner & Gropp 2005, "Optimization of Collective Communication Operations
    in MPICH", §4.5, without the term of the additions.
    """
    return 2 * (size - 1) * (alpha_s + message_bytes / size * beta_s_per_byte)


def _networks() -> Iterator[tuple[int, int, float, float]]:
    yield 4_000_000, 4, 1e-3, 1e-9
    yield 65_536, 8, 2e-3, 5e-8
    yield 1_000_000, 2, 5e-4, 3e-9
    yield 8_192, 64, 1e-3, 2e-7
    yield 4_096, 1, 1e-3, 1e-8


RING_TIME = TEXTS.exercise(
    "ring-time",
    ring_seconds,
    cases=_networks,
    mistakes={
        "bytes of two whole messages": lambda n, p, a, b: 2 * (p - 1) * a + 2 * n * b,
        "one half of the all-reduce only": lambda n, p, a, b: (p - 1) * (a + n / p * b),
        "each step carries the whole message here": lambda n, p, a, b: 2 * (p - 1) * (a + n * b),
        "the latency is missing": lambda n, p, a, b: 2 * (p - 1) / p * n * b,
        "α is paid once only": lambda n, p, a, b: a + 2 * (p - 1) / p * n * b,
        "α is paid once per half": lambda n, p, a, b: 2 * a + 2 * (p - 1) / p * n * b,
        "one step too many in each half": lambda n, p, a, b: 2 * p * (a + n / p * b),
        "the bytes are paid once only": lambda n, p, a, b: 2 * (p - 1) * a + n / p * b,
        "you divide by β": lambda n, p, a, b: 2 * (p - 1) * (a + n / p / b),
        "you multiply by 4 bytes per number": lambda n, p, a, b: 2 * (p - 1) * (a + 4 * n / p * b),
        "one message from one rank to another": lambda n, p, a, b: a + n * b,
        "the time of a tree": lambda n, p, a, b: 2 * math.log2(p) * (a + n * b),
    },
)


def fit_alpha_beta(message_bytes: Sequence[float], seconds: Sequence[float], size: int) -> Pair:
    """α (s) and β (s per byte) of a ring all-reduce of `size` ranks, from its times: t = 2 (p − 1) (α + β n / p)."""
    return _per_step(weighted_line(message_bytes, seconds), size)


def _per_step(line: Pair, size: int) -> Pair:
    steps = 2 * (size - 1)
    # t = a + b·n is the whole ring: a holds 2 (p - 1) latencies, b the time of 2 (p - 1) chunks of n / p bytes.
    return line[0] / steps, line[1] * size / steps


def _absolute(message_bytes: Sequence[float], seconds: Sequence[float]) -> Pair:
    return weighted_line(message_bytes, seconds, [1.0] * len(seconds))


def _ends(message_bytes: Sequence[float], seconds: Sequence[float]) -> Pair:
    """Through the shortest and the longest message alone."""
    pairs = sorted(zip(message_bytes, seconds, strict=True))
    (few, short_s), (many, long_s) = pairs[0], pairs[-1]
    slope = (long_s - short_s) / (many - few)
    return short_s - slope * few, slope


def _measurements() -> Iterator[tuple[list[float], list[float], int]]:
    """Times of networks that do not exist, some too long by a quarter, some too short."""
    rough = (1.0, 1.25, 0.8, 1.1, 0.85, 1.2, 0.95, 0.75, 1.15)
    for shift, (size, alpha_s, beta_s_per_byte) in enumerate(((4, 5e-5, 4e-10), (2, 2e-4, 3e-9), (8, 1e-5, 1e-10))):
        message_bytes = [float(2**exponent) for exponent in range(10, 26, 2)]
        seconds = [
            ring_seconds(count, size, alpha_s, beta_s_per_byte) * rough[(index + 4 * shift) % len(rough)]
            for index, count in enumerate(message_bytes)
        ]
        yield message_bytes, seconds, size


_FIT_MISTAKES = (
    *(
        Mistake(
            lambda n, t, p, power=power: _per_step(weighted_line(n, t, [1 / seconds**power for seconds in t]), p),
            "The line is fitted with other weights than 1 / t: np.polyfit multiplies each gap by its weight before it "
            "squares it, so relative gaps take w = 1 / t, neither 1 / t² nor 1 / √t.",
            "La droite est ajustée avec d’autres poids que 1 / t : np.polyfit multiplie chaque écart par son poids "
            "avant de l’élever au carré ; des écarts relatifs demandent donc w = 1 / t, et non 1 / t² ni 1 / √t.",
        )
        for power in (4, 1)
    ),
    Mistake(
        lambda n, t, p: 2 * (p - 1) * weighted_line(n, t)[0],
        "You multiply a by the 2 (p − 1) steps: a is the latency of all of them together, so divide.",
        "Vous multipliez a par les 2 (p − 1) étapes : a est leur latence à toutes, donc divisez.",
        part=0,
    ),
    Mistake(
        lambda n, t, p: weighted_line(n, t),
        "The line is right, t = a + b n, but it is that of the whole all-reduce: a = 2 (p − 1) α and "
        "b = 2 (p − 1) / p · β; solve for α and β.",
        "La droite est juste, t = a + b n, mais c’est celle de l’all-reduce entier : a = 2 (p − 1) α et "
        "b = 2 (p − 1) / p · β ; tirez-en α et β.",
    ),
    Mistake(
        lambda n, t, p: _per_step(_absolute(n, t), p),
        "You minimise gaps in seconds: the longest messages decide, and α, which only the short ones show, is "
        "lost. Divide each row by its time, so that relative gaps count.",
        "Vous minimisez des écarts en secondes : les plus longs messages décident, et α, que seuls les courts "
        "révèlent, se perd. Divisez chaque ligne par sa durée, pour que comptent les écarts relatifs.",
    ),
    Mistake(
        lambda n, t, p: _absolute(n, t),
        "Two things: you minimise gaps in seconds, where relative gaps are asked for; and a and b are those of "
        "the whole all-reduce, not yet α and β.",
        "Deux choses : vous minimisez des écarts en secondes, alors qu’on demande des écarts relatifs ; et a et b "
        "sont ceux de l’all-reduce entier, pas encore α et β.",
    ),
    Mistake(
        lambda n, t, p: _per_step(_ends(n, t), p),
        "Your line goes through two measurements alone, and carries their errors whole; use all of them, by "
        "least squares.",
        "Votre droite ne passe que par deux mesures, dont elle hérite toute l’erreur ; utilisez-les toutes, par "
        "moindres carrés.",
    ),
    Mistake(
        lambda n, t, p: (fit_alpha_beta(n, t, p)[1], fit_alpha_beta(n, t, p)[0]),
        "You return β, then α: swap them.",
        "Vous renvoyez β puis α : échangez-les.",
    ),
    Mistake(
        lambda n, t, p: (weighted_line(n, t)[0] / (2 * (p - 1)), weighted_line(n, t)[1] / (2 * (p - 1))),
        "α is right. A step carries one chunk of n / p bytes only, so b = 2 (p − 1) / p · β: your β lacks a factor p.",
        "α est juste. Une étape ne transporte qu’un morceau de n / p octets, donc b = 2 (p − 1) / p · β : il "
        "manque un facteur p à votre β.",
    ),
    Mistake(
        lambda n, t, p: 1 / fit_alpha_beta(n, t, p)[1],
        "α is right. β is in seconds per byte; you give its inverse, the bandwidth.",
        "α est juste. β est en secondes par octet ; vous donnez son inverse, le débit.",
        part=1,
    ),
    Mistake(
        lambda n, t, p: _per_step(weighted_line(n, t), 4),
        "You compute with 4 ranks whatever `size` is.",
        "Vous calculez avec 4 rangs quel que soit `size`.",
    ),
    Mistake(
        lambda n, t, p: (2 * fit_alpha_beta(n, t, p)[0], 2 * fit_alpha_beta(n, t, p)[1]),
        "Both are twice too large: the ring takes 2 (p − 1) steps, reduce-scatter and all-gather.",
        "Les deux sont deux fois trop grands : l’anneau fait 2 (p − 1) étapes, reduce-scatter et all-gather.",
    ),
)
FIT_TOLERANCE = 0.01
"""Relative: float32 arithmetic passes, none of the mistakes above comes so close."""


ALPHA_BETA = TEXTS.exercise(
    "alpha-beta",
    fit_alpha_beta,
    cases=_measurements,
    mistakes=_FIT_MISTAKES,
    parts=(Said("α (s)", "α (s)"), Said("β (s per byte)", "β (s par octet)")),
    told=Said("For the times of {2} ranks", "Pour les durées de {2} rangs"),
    tolerance=FIT_TOLERANCE,
)


CASES = ((24, 4), (1797, 4), (103, 3), (50, 2), (3, 4))
SEED, EPOCHS = 7, 3
Shards = list[list[int]]


def _shards(answer: Callable[..., Any], num_samples: int, size: int, epoch: int, seed: int = SEED) -> Shards:
    return [_indices(answer(num_samples, rank, size, epoch, seed)) for rank in range(size)]


_indices = reader(
    lambda value: [operator.index(index) for index in (value.tolist() if hasattr(value, "tolist") else value)],
    "Indices of samples, whole numbers, are expected in a list or a tensor",
    "On attend des numéros d’échantillons, entiers, dans une liste ou un tenseur",
)


def _check_sampler(answer: Callable[..., Any], num_samples: int, size: int) -> None:
    epochs = [_shards(answer, num_samples, size, epoch) for epoch in range(EPOCHS)]
    if [_shards(answer, num_samples, size, epoch) for epoch in range(EPOCHS)] != epochs:
        raise Wrong(*_NOT_REPEATED)
    for shards in epochs:
        _judge_range(shards, num_samples)
    for shards in epochs:
        _judge_epoch(shards, num_samples, size)
    if num_samples >= size:
        _judge_epochs(epochs, num_samples, size)


def _check_seed(answer: Callable[..., Any]) -> None:
    num_samples, size = CASES[1]
    unused = [
        _shards(answer, num_samples, size, epoch, SEED + 100) == _shards(answer, num_samples, size, epoch)
        for epoch in range(EPOCHS)
    ]
    if all(unused):
        raise Wrong(*_SEED_UNUSED)
    if unused[0]:
        raise Wrong(*_SEED_UNUSED_AT_FIRST)
    if any(unused):
        raise Wrong(
            en=f"In epoch {unused.index(True)} the seed changes nothing: two trainings with different seeds would read "
            "the same batches there.",
            fr=f"À l’époque {unused.index(True)}, la graine ne change rien : deux entraînements de graines différentes "
            "y liraient les mêmes batches.",
        )
    shards = _shards(answer, num_samples, size, 1)
    with hashes_of_another_process():
        elsewhere = _shards(answer, num_samples, size, 1)
    if shards != elsewhere:
        raise Wrong(*_HASHED)


def _judge_range(shards: Shards, num_samples: int) -> None:
    outside = [index for shard in shards for index in shard if not 0 <= index < num_samples]
    if outside:
        raise Wrong(
            en=f"Sample {outside[0]} does not exist: {num_samples} samples are numbered from 0 to {num_samples - 1}.",
            fr=f"L’échantillon {outside[0]} n’existe pas : {num_samples} échantillons sont numérotés de 0 à "
            f"{num_samples - 1}.",
        )


def _judge_epoch(shards: Shards, num_samples: int, size: int) -> None:
    """One epoch: divided among the ranks, equally, whole."""
    lengths = [len(shard) for shard in shards]
    if any(shards) and all(set(shard) == set(shards[0]) for shard in shards):
        raise Wrong(*_ALL_THE_SAME)
    common = {
        index for rank, shard in enumerate(shards) for index in shard if any(index in shards[r] for r in range(rank))
    }
    filled_up = num_samples % size and set(lengths) == {-(-num_samples // size)} and len(common) <= size
    if filled_up:
        raise Wrong(
            en=f"With {size} ranks, {len(common)} of {num_samples} samples are read by two ranks in one epoch: the "
            "shares are filled up to the same length with samples that another rank has. Drop what fills no whole "
            "share instead.",
            fr=f"Avec {size} rangs, {len(common)} échantillons sur {num_samples} sont lus par deux rangs dans la même "
            "époque : les parts sont complétées à la même longueur par des échantillons d’un autre rang. Écartez "
            "plutôt ce qui ne remplit pas une part entière.",
        )
    if common:
        raise Wrong(
            en=f"With {size} ranks, {len(common)} of {num_samples} samples are read by two ranks in one epoch. Do all "
            "ranks shuffle alike (same seed on every rank, never the rank in it)? Is each sample dealt to one rank "
            "alone, and are those dropped that fill no whole share?",
            fr=f"Avec {size} rangs, {len(common)} échantillons sur {num_samples} sont lus par deux rangs dans la même "
            "époque. Tous les rangs mélangent-ils de la même façon (une même graine, qui ne dépend jamais du rang) ? "
            "Chacun prend-il ensuite une part à lui, sans ce qui ne remplit pas une part entière ?",
        )
    if any(len(set(shard)) < len(shard) for shard in shards):
        raise Wrong(
            en="A rank reads a sample twice in one epoch: shuffle with a permutation (torch.randperm), do not "
            "draw with replacement.",
            fr="Un rang lit deux fois un échantillon dans la même époque : mélangez par une permutation "
            "(torch.randperm), sans tirage avec remise.",
        )
    if len(set(lengths)) > 1:
        raise Wrong(
            en=f"For {num_samples} samples and {size} ranks the shares are of {', '.join(map(str, lengths))} "
            "samples: a rank with one more step waits for ever for the others' all-reduce. Give each "
            "num_samples // size and drop the rest.",
            fr=f"Pour {num_samples} échantillons et {size} rangs, les parts comptent "
            f"{', '.join(map(str, lengths))} échantillons : un rang qui a un pas de plus attend sans fin "
            "l’all-reduce des autres. Donnez-en num_samples // size à chacun et écartez le reste.",
        )
    if lengths[0] != num_samples // size:
        raise Wrong(
            en=f"For {num_samples} samples and {size} ranks each share has {lengths[0]} samples, but "
            f"{num_samples // size} are expected: drop only what fills no whole share.",
            fr=f"Pour {num_samples} échantillons et {size} rangs, chaque part compte {lengths[0]} échantillons, "
            f"mais on en attend {num_samples // size} : n’écartez que ce qui ne remplit pas une part entière.",
        )


def _judge_epochs(epochs: Sequence[Shards], num_samples: int, size: int) -> None:
    """From epoch to epoch: shuffled, each time anew, over the whole data set."""
    first_epoch = epochs[0]
    dealt = [list(range(rank, num_samples, size))[: num_samples // size] for rank in range(size)]
    share = num_samples // size
    blocks = [list(range(rank * share, (rank + 1) * share)) for rank in range(size)]
    if any(shards in (dealt, blocks) for shards in epochs):
        raise Wrong(*_NOT_SHUFFLED)
    if any(earlier == following for earlier, following in combinations(epochs, 2)):
        raise Wrong(*_SAME_EVERY_EPOCH)
    if all(sorted(shard) == sorted(first_epoch[rank]) for shards in epochs for rank, shard in enumerate(shards)):
        raise Wrong(*_OWN_PART_ONLY)
    before, *later = ({pair for shard in shards for pair in pairwise(shard)} for shards in epochs)
    if any(len(pairs & before) > len(before) / 2 for pairs in later):
        raise Wrong(
            en="Most samples follow the same one in every epoch: your order is turned or cut elsewhere, not shuffled "
            "anew. Seed a new shuffle with seed and epoch.",
            fr="La plupart des échantillons suivent le même à chaque époque : votre ordre est décalé ou coupé "
            "ailleurs, et non mélangé de nouveau. Faites un nouveau mélange, dont la graine dépend de seed et d’epoch.",
        )
    never = set(range(num_samples)).difference(*(shard for shards in epochs for shard in shards))
    if never:
        raise Wrong(
            en=f"In {len(epochs)} epochs, with {size} ranks, sample {min(never)} of {num_samples} is never read: what "
            "fills no whole share must be left out after shuffling, so that it is another sample in every epoch.",
            fr=f"En {len(epochs)} époques, avec {size} rangs, l’échantillon {min(never)} sur {num_samples} n’est "
            "jamais lu : ce qui ne remplit pas une part entière est à écarter après le mélange, pour que ce soit un "
            "autre échantillon à chaque époque.",
        )


_NOT_REPEATED = Said(
    "Asked twice for the same epoch, your function gives two different answers, so the ranks, each in a separate "
    "process, would not agree on who reads what: shuffle with a generator seeded by seed and epoch.",
    "Interrogée deux fois pour la même époque, votre fonction donne deux réponses différentes : les rangs, chacun dans "
    "son processus, ne s’accorderaient pas sur qui lit quoi ; mélangez avec un générateur initialisé par seed et "
    "epoch.",
)
_ALL_THE_SAME = Said(
    "Every rank reads the same samples: four ranks then learn what one alone would learn, at four times the price. "
    "Give each rank another part.",
    "Tous les rangs lisent les mêmes échantillons : à quatre, ils apprennent alors ce qu’un seul apprendrait, pour "
    "quatre fois le prix. Donnez à chaque rang sa propre part.",
)
_NOT_SHUFFLED = Said(
    "The samples are divided among the ranks, but not shuffled: data sets are often sorted by class, and the batches "
    "would be, too.",
    "Les échantillons sont répartis, mais pas mélangés : les jeux de données sont souvent triés par classe, et les "
    "batches le seraient aussi.",
)
_SAME_EVERY_EPOCH = Said(
    "Every epoch has the same order: make the seed depend on the epoch (this is what sampler.set_epoch is for).",
    "Toutes les époques ont le même ordre : faites dépendre la graine de l’époque (c’est à cela que sert "
    "sampler.set_epoch).",
)
_OWN_PART_ONLY = Said(
    "A rank always reads the same part of the data, in another order: divided first and shuffled then, the parts "
    "never mix. Shuffle the whole data set, then divide it.",
    "Un rang lit toujours la même part des données, dans un autre ordre : réparties avant d’être mélangées, les parts "
    "ne se brassent jamais. Mélangez tout le jeu de données, puis répartissez-le.",
)
_SEED_UNUSED = Said(
    "The seed changes nothing: two trainings with different seeds would read the same batches.",
    "La graine ne change rien : deux entraînements de graines différentes liraient les mêmes batches.",
)

_SEED_UNUSED_AT_FIRST = Said(
    "In epoch 0 the seed changes nothing, in later ones it does: two trainings with different seeds would read the "
    "same batches in the first epoch. (Seed × epoch, for example, is 0 there.)",
    "À l’époque 0, la graine ne change rien, aux suivantes oui : deux entraînements de graines différentes liraient "
    "les mêmes batches à la première époque. (graine × époque, par exemple, y vaut 0.)",
)
_HASHED = Said(
    "In another process your function gives other indices, so the ranks would not agree on who reads what: Python "
    "salts hash() of a text anew in every process. Make the seed from numbers alone.",
    "Dans un autre processus, votre fonction donne d’autres numéros, et les rangs ne s’accorderaient pas sur qui lit "
    "quoi : Python sale hash() d’un texte à neuf dans chaque processus. Faites la graine de nombres seuls.",
)

SAMPLER = TEXTS.exercise(
    "sampler",
    cases=CASES,
    trial=_check_sampler,
    then=_check_seed,
)


def scaled_rate(step: int, base_rate: float, scale: float, warmup_steps: int) -> float:
    """Learning rate of a batch `scale` times as large: from `base_rate` in a straight line to `scale · base_rate`.

    Source: Goyal et al. 2017 (arXiv 1706.02677), §2.1 (linear scaling) and §2.2 (gradual warm-up).
    """
    share = min(1.0, step / warmup_steps)
    return base_rate * (1 + (scale - 1) * share)


def _steps() -> Iterator[tuple[int, float, float, int]]:
    for base_rate, scale, warmup_steps in ((0.1, 8, 40), (0.02, 16, 10)):
        for step in (0, 1, 7, 10, 39, 40, 41, 500):
            yield step, base_rate, scale, warmup_steps


LEARNING_RATE = TEXTS.exercise(
    "learning-rate",
    scaled_rate,
    cases=_steps,
    mistakes={
        "no warm-up": lambda step, base, scale, warm: base * scale,
        "you start from zero": lambda step, base, scale, warm: base * scale * min(1, step / warm),
        "you start from nearly zero": lambda step, base, scale, warm: base * scale * min(1, (step + 1) / warm),
        "the rate goes on rising after the warm-up": lambda step, base, scale, warm: (
            base * (1 + (scale - 1) * step / warm)
        ),
        "you scale by the square root": lambda step, base, scale, warm: (
            base * (1 + (math.sqrt(scale) - 1) * min(1, step / warm))
        ),
        "you rise by scale times the base rate": lambda step, base, scale, warm: (
            base * (1 + scale * min(1, step / warm))
        ),
        "a jump at the end of the warm-up": lambda step, base, scale, warm: base if step < warm else base * scale,
        "you rise by base_rate during the warm-up": lambda step, base, scale, warm: base * min(1 + step / warm, scale),
        "you are one step ahead": lambda step, base, scale, warm: scaled_rate(step + 1, base, scale, warm),
        "you arrive one step too early": lambda step, base, scale, warm: scaled_rate(step, base, scale, warm - 1),
        "geometric in place of linear rise": lambda step, base, scale, warm: base * scale ** min(1, step / warm),
        "the rate falls back after the warm-up": lambda step, base, scale, warm: (
            scaled_rate(step, base, scale, warm) if step <= warm else base
        ),
        "the rate never changes": lambda step, base, scale, warm: base,
    },
)
