"""Lab 03: which samples a rank reads in an epoch.

Layer 6 (labs). Invariant: no order is prescribed; what is judged is what data parallelism needs: ranks that share the
epoch out, as many samples on each, another order in every epoch, the same answer when asked again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.verdict import Said
from dlojz.text import say

CASES = ((24, 4), (1797, 4), (103, 3), (50, 2))
SEED, EPOCHS = 7, 3
Shards = list[list[int]]


def _shards(answer: Callable[..., Any], num_samples: int, size: int, epoch: int, seed: int = SEED) -> Shards:
    return [_indices(answer(num_samples, rank, size, epoch, seed)) for rank in range(size)]


def _indices(value: object) -> list[int]:
    if value is None:
        raise Wrong(
            say(
                en="Your function returns nothing: end it with return.",
                fr="Votre fonction ne renvoie rien : terminez-la par return.",
            )
        )
    parts: Any = value.tolist() if hasattr(value, "tolist") else value
    try:
        return [int(index) for index in parts]
    except (TypeError, ValueError):
        raise Wrong(
            say(
                en=f"Indices of samples are expected, in a list or a tensor; your function returns {str(value)[:80]}.",
                fr="On attend des numéros d’échantillons, dans une liste ou un tenseur ; votre fonction renvoie "
                f"{str(value)[:80]}.",
            )
        ) from None


def _judge(answer: Callable[..., Any]) -> None:
    for num_samples, size in CASES:
        epochs = [_shards(answer, num_samples, size, epoch) for epoch in range(EPOCHS)]
        if _shards(answer, num_samples, size, 0) != epochs[0]:
            raise Wrong(str(_NOT_REPEATED))
        for shards in epochs:
            _judge_range(shards, num_samples)
        _judge_epoch(epochs[0], num_samples, size)
        _judge_epochs(epochs, num_samples, size)
    num_samples, size = CASES[1]
    if _shards(answer, num_samples, size, 0, SEED + 100) == _shards(answer, num_samples, size, 0):
        raise Wrong(str(_SEED_UNUSED))


def _judge_range(shards: Shards, num_samples: int) -> None:
    outside = [index for shard in shards for index in shard if not 0 <= index < num_samples]
    if outside:
        raise Wrong(
            say(
                en=f"Sample {outside[0]} does not exist: {num_samples} samples are numbered from 0 to "
                f"{num_samples - 1}.",
                fr=f"L’échantillon {outside[0]} n’existe pas : {num_samples} échantillons sont numérotés de 0 à "
                f"{num_samples - 1}.",
            )
        )


def _judge_epoch(shards: Shards, num_samples: int, size: int) -> None:
    """One epoch: shared out, equally, whole."""
    lengths = [len(shard) for shard in shards]
    if all(sorted(shard) == list(range(num_samples)) for shard in shards) or all(
        set(shard) == set(shards[0]) for shard in shards
    ):
        raise Wrong(str(_ALL_THE_SAME))
    common = {
        index for rank, shard in enumerate(shards) for index in shard if any(index in shards[r] for r in range(rank))
    }
    if common:
        raise Wrong(
            say(
                en=f"With {size} ranks, {len(common)} of {num_samples} samples are read by two ranks in one epoch: the "
                "ranks must all shuffle alike (same seed on every rank, never the rank in it), then each takes its "
                "own part; what fills no whole share is dropped.",
                fr=f"Avec {size} rangs, {len(common)} échantillons sur {num_samples} sont lus par deux rangs dans la "
                "même époque : tous les rangs doivent mélanger de la même façon (une même graine, qui ne dépend "
                "jamais du rang), puis chacun prend sa part ; ce qui ne remplit pas une part entière est écarté.",
            )
        )
    if any(len(set(shard)) < len(shard) for shard in shards):
        raise Wrong(
            say(
                en="A rank reads a sample twice in one epoch: shuffle with a permutation (torch.randperm), do not "
                "draw with replacement.",
                fr="Un rang lit deux fois un échantillon dans la même époque : mélangez par une permutation "
                "(torch.randperm), sans tirage avec remise.",
            )
        )
    if len(set(lengths)) > 1:
        raise Wrong(
            say(
                en=f"For {num_samples} samples and {size} ranks the shares are of {', '.join(map(str, lengths))} "
                "samples: a rank with one more step waits for ever for the others' all-reduce. Give each "
                "num_samples // size and drop the rest.",
                fr=f"Pour {num_samples} échantillons et {size} rangs, les parts comptent "
                f"{', '.join(map(str, lengths))} échantillons : un rang qui a un pas de plus attend sans fin "
                "l’all-reduce des autres. Donnez-en num_samples // size à chacun et écartez le reste.",
            )
        )
    if lengths[0] != num_samples // size:
        raise Wrong(
            say(
                en=f"For {num_samples} samples and {size} ranks each share has {lengths[0]} samples, but "
                f"{num_samples // size} are expected: drop only what fills no whole share.",
                fr=f"Pour {num_samples} échantillons et {size} rangs, chaque part compte {lengths[0]} échantillons, "
                f"mais on en attend {num_samples // size} : n’écartez que ce qui ne remplit pas une part entière.",
            )
        )


def _judge_epochs(epochs: Sequence[Shards], num_samples: int, size: int) -> None:
    """From epoch to epoch: shuffled, each time anew, over the whole data set."""
    first = epochs[0]
    dealt = [list(range(rank, num_samples, size))[: num_samples // size] for rank in range(size)]
    share = num_samples // size
    blocks = [list(range(rank * share, (rank + 1) * share)) for rank in range(size)]
    if first in (dealt, blocks):
        raise Wrong(str(_NOT_SHUFFLED))
    if all(shards == first for shards in epochs):
        raise Wrong(str(_SAME_EVERY_EPOCH))
    if all(sorted(shard) == sorted(first[rank]) for shards in epochs for rank, shard in enumerate(shards)):
        raise Wrong(str(_OWN_PART_ONLY))


_NOT_REPEATED = Said(
    "Asked twice for the same epoch, your function gives two different answers, so the ranks, each in a process of its "
    "own, would not agree on who reads what: shuffle with a generator seeded by seed and epoch.",
    "Interrogée deux fois pour la même époque, votre fonction donne deux réponses différentes : les rangs, chacun dans "
    "son processus, ne s’accorderaient pas sur qui lit quoi ; mélangez avec un générateur initialisé par seed et "
    "epoch.",
)
_ALL_THE_SAME = Said(
    "Every rank reads the same samples: four ranks then learn what one alone would learn, at four times the price. "
    "Give each rank a part of its own.",
    "Tous les rangs lisent les mêmes échantillons : à quatre, ils apprennent alors ce qu’un seul apprendrait, pour "
    "quatre fois le prix. Donnez à chaque rang sa propre part.",
)
_NOT_SHUFFLED = Said(
    "The samples are shared out, but not shuffled: data sets are often sorted by class, and the batches would be, too.",
    "Les échantillons sont répartis, mais pas mélangés : les jeux de données sont souvent triés par classe, et les "
    "batches le seraient aussi.",
)
_SAME_EVERY_EPOCH = Said(
    "Every epoch has the same order: make the seed depend on the epoch (this is what sampler.set_epoch is for).",
    "Toutes les époques ont le même ordre : faites dépendre la graine de l’époque (c’est à cela que sert "
    "sampler.set_epoch).",
)
_OWN_PART_ONLY = Said(
    "A rank always reads the same part of the data, in another order: shared out first and shuffled then, the parts "
    "never mix. Shuffle the whole data set, then share it out.",
    "Un rang lit toujours la même part des données, dans un autre ordre : réparties avant d’être mélangées, les parts "
    "ne se brassent jamais. Mélangez tout le jeu de données, puis répartissez-le.",
)
_SEED_UNUSED = Said(
    "The seed changes nothing: two trainings with different seeds would read the same batches.",
    "La graine ne change rien : deux entraînements de graines différentes liraient les mêmes batches.",
)

SAMPLER = Exercise(
    id="sampler",
    title=Said("which rank reads which samples", "quel rang lit quels échantillons"),
    judge=_judge,
    praise=Said(
        "Right: disjoint, equal, reshuffled with every epoch, without a single communication.",
        "Exact : des parts disjointes, égales, remélangées à chaque époque, sans la moindre communication.",
    ),
    hints=(
        Said(
            "All ranks can compute the same permutation of the whole data set; what is then left to do for one rank?",
            "Tous les rangs peuvent calculer la même permutation du jeu de données entier ; que reste-t-il alors à "
            "faire pour un rang ?",
        ),
        Said(
            "torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed + epoch)), then every size-th "
            "index from rank on, and only the first num_samples // size of these.",
            "torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed + epoch)), puis un indice "
            "tous les size à partir de rank, et seulement les num_samples // size premiers.",
        ),
    ),
)
