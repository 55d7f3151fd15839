"""What is wrong with values that ranks computed together: the usual faults of parallel code, by name.

Layer 6 (labs), pure. Invariant: a fault is named only if it explains the values of every rank that is wrong; what no
fault explains is told as a difference, with the rank where it is largest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dlojz.labs.rank_evidence import Evidence, same
from dlojz.labs.verdict import Said
from dlojz.ranks.diagnosis import listed, with_article

if TYPE_CHECKING:
    from torch import Tensor


def diagnose(evidence: Evidence) -> Said | None:
    """The fault that explains what the ranks gave; None where all is right."""
    wrong = [rank for rank in range(evidence.size) if not evidence.right(rank)]
    if not wrong:
        return None
    for explains in (_nothing, _shape, _scaled, _alone, _biased, _other_rank, _other_axis, _other_chunks, _disagree):
        said = explains(evidence, wrong)
        if said is not None:
            return said
    return _difference(evidence, wrong)


def _en(ranks: Sequence[int]) -> str:
    return listed(ranks, french=False)


def _fr(ranks: Sequence[int]) -> str:
    return with_article(listed(ranks, french=True))


def _on(evidence: Evidence, wrong: Sequence[int]) -> tuple[str, str]:
    """Where: nothing if everywhere."""
    if len(wrong) == evidence.size:
        return "", ""
    return f" on {_en(wrong)}", f" sur {_fr(wrong)}"


def _nothing(evidence: Evidence, wrong: Sequence[int]) -> Said | None:
    empty = [rank for rank in wrong if evidence.given[rank] is None]
    if empty:
        en, fr = _on(evidence, empty)
        if evidence.backward:
            return Said(
                f"There is no {_plain(evidence.label.en)}{en}: nothing links the result to it; a communication done in "
                "place or under no_grad cuts the chain of the backward pass.",
                f"Il n’y a rien{fr} pour {evidence.label.fr} : rien n’y relie le résultat ; une communication faite "
                "en place ou sous no_grad rompt la chaîne de la passe arrière.",
            )
        return Said(
            f"Your function returns nothing{en}: end it with return.",
            f"Votre fonction ne renvoie rien{fr} : terminez-la par return.",
        )
    return None


def _shape(evidence: Evidence, wrong: Sequence[int]) -> Said | None:
    odd = [rank for rank in wrong if evidence.given[rank].shape != evidence.expected[rank].shape]
    if not odd or (evidence.whole is not None and _axis_of(evidence, odd) is not None):
        return None
    rank = odd[0]
    given, expected = tuple(evidence.given[rank].shape), tuple(evidence.expected[rank].shape)
    return Said(
        f"On rank {rank} {evidence.label.en} has the shape {given}, but {expected} is expected.",
        f"Sur le rang {rank}, {evidence.label.fr} a la forme {given}, mais {expected} est attendue.",
    )


def _scaled(evidence: Evidence, wrong: Sequence[int]) -> Said | None:
    size = evidence.size
    if len(wrong) < size:
        return None
    if _all(evidence, lambda rank: size * evidence.expected[rank]):
        if evidence.backward:
            return Said(
                f"The {_plain(evidence.label.en)} is {size} times too large, as many times as there are ranks: a sum "
                "over the ranks stands where their mean belongs, or the sum is made twice.",
                f"{_capital(evidence.label.fr)} est {size} fois trop grand, soit le nombre de rangs : une somme sur "
                "les rangs tient lieu de moyenne, ou la somme est faite deux fois.",
            )
        return Said(
            f"{_capital(evidence.label.en)} is {size} times too large, as many times as there are ranks: what should "
            "count once is added on every rank.",
            f"Dans {evidence.label.fr}, tout est {size} fois trop grand, soit le nombre de rangs : ce qui devrait "
            "compter une fois est ajouté sur chaque rang.",
        )
    if _all(evidence, lambda rank: evidence.expected[rank] / size):
        return Said(
            f"{_capital(evidence.label.en)} is {size} times too small: it is divided by the number of ranks once too "
            "often.",
            f"Dans {evidence.label.fr}, tout est {size} fois trop petit : une division par le nombre de rangs est de "
            "trop.",
        )
    return None


def _alone(evidence: Evidence, wrong: Sequence[int]) -> Said | None:
    if not evidence.local:
        return None
    size = evidence.size
    en, fr = _on(evidence, wrong)
    way_en, way_fr = ("backward", "la passe arrière") if evidence.backward else ("forward", "la passe avant")
    if all(same(evidence.given[rank], evidence.local[rank]) for rank in wrong):
        if len(wrong) < size:
            have = [rank for rank in range(size) if rank not in wrong]
            several, alone = len(wrong) > 1, len(have) == 1
            return Said(
                f"Only {_en(have)} got the result; {_en(wrong)} still {'hold their' if several else 'holds its'} own "
                "part: every rank needs the result (all-reduce, not reduce).",
                f"{_capital(_fr(have))} {'est seul' if alone else 'sont seuls'} à avoir le résultat ; {_fr(wrong)} "
                f"{'gardent leur' if several else 'garde sa'} propre part : chaque rang a besoin du résultat "
                "(all-reduce, et non reduce).",
            )
        return Said(
            f"Every rank keeps its own part of {evidence.label.en}: the communication of the {way_en} pass is "
            "missing (an all-reduce, or what you do in its place), or its result is thrown away.",
            f"Chaque rang garde sa propre part ({evidence.label.fr}) : la communication de {way_fr} manque (un "
            "all-reduce, ou ce qui en tient lieu), ou son résultat est perdu.",
        )
    if all(same(evidence.given[rank], evidence.local[rank] / size) for rank in wrong):
        return Said(
            f"Every rank divides its own part of {evidence.label.en} by the number of ranks, but the sum over the "
            f"ranks is missing{en}.",
            f"Chaque rang divise sa propre part ({evidence.label.fr}) par le nombre de rangs, mais la somme sur les "
            f"rangs manque{fr}.",
        )
    return None


def _biased(evidence: Evidence, wrong: Sequence[int]) -> Said | None:
    if evidence.bias is None:
        return None
    size, bias = evidence.size, evidence.bias
    if all(same(evidence.given[rank], evidence.expected[rank] + (size - 1) * bias) for rank in wrong):
        return Said(
            f"The bias is added on every rank before the sum, so it counts {size} times: add it once, after the "
            "all-reduce (or on one rank only).",
            f"Le biais est ajouté sur chaque rang avant la somme, il compte donc {size} fois : ajoutez-le une seule "
            "fois, après l’all-reduce (ou sur un seul rang).",
        )
    if all(same(evidence.given[rank], evidence.expected[rank] - bias) for rank in wrong):
        return Said("The bias is never added.", "Le biais n’est jamais ajouté.")
    return None


def _other_rank(evidence: Evidence, wrong: Sequence[int]) -> Said | None:
    """Each rank holds what another should: the ranks are in another order."""
    size, expected = evidence.size, evidence.expected
    if size < 2 or all(same(expected[rank], expected[0]) for rank in range(size)):
        return None
    holds: dict[int, int] = {}
    for rank in range(size):
        found = [other for other in range(size) if same(evidence.given[rank], expected[other])]
        if not found:
            return None
        holds[rank] = rank if rank in found else found[0]
    rank = wrong[0]
    return Said(
        f"The order of the ranks is another one: rank {rank} holds what rank {holds[rank]} should. Who is left, who is "
        "right, and which part is whose?",
        f"L’ordre des rangs n’est pas le bon : le rang {rank} détient ce que le rang {holds[rank]} devrait avoir. Qui "
        "est à gauche, qui est à droite, et à qui revient quelle part ?",
    )


def _axis_of(evidence: Evidence, ranks: Sequence[int]) -> int | None:
    """The dimension along which the whole was cut, if that explains what the ranks gave."""
    whole = evidence.whole
    if whole is None:
        return None
    for dim in range(whole.dim()):
        shards = whole.tensor_split(evidence.size, dim)
        if all(same(evidence.given[rank], shards[rank]) for rank in ranks):
            return dim
    return None


def _other_axis(evidence: Evidence, wrong: Sequence[int]) -> Said | None:
    dim = _axis_of(evidence, wrong)
    if dim is None or evidence.whole is None:
        return None
    right = next(
        (
            axis
            for axis in range(evidence.whole.dim())
            if same(evidence.whole.tensor_split(evidence.size, axis)[0], evidence.expected[0])
        ),
        None,
    )
    if right is None:
        return None
    return Said(
        f"The wrong dimension is split: {evidence.label.en} is cut along dim {dim}, but the shards lie along dim "
        f"{right}.",
        f"Ce n’est pas la bonne dimension ({evidence.label.fr}) : le découpage est fait selon dim={dim}, mais les "
        f"parts se suivent selon dim={right}.",
    )


def _other_chunks(evidence: Evidence, wrong: Sequence[int]) -> Said | None:
    """The right chunks in another order, as an all-gather that forgets whose part it receives."""
    size = evidence.size
    for dim in range(evidence.expected[0].dim()):
        if all(_reordered(evidence.given[rank], evidence.expected[rank], size, dim) for rank in wrong):
            return Said(
                f"The chunks of {evidence.label.en} are right, but in another order on {_en(wrong)}: chunk i must "
                "stand at place i on every rank.",
                f"Les morceaux sont les bons ({evidence.label.fr}), mais dans un autre ordre sur {_fr(wrong)} : le "
                "morceau i doit être à la place i sur chaque rang.",
            )
    return None


def _reordered(value: Any, right: Tensor, size: int, dim: int) -> bool:
    if value.shape != right.shape or right.shape[dim] < size or right.shape[dim] % size:
        return False
    mine, theirs = value.chunk(size, dim), list(right.chunk(size, dim))
    for chunk in mine:
        found = next((index for index, other in enumerate(theirs) if same(chunk, other)), None)
        if found is None:
            return False
        del theirs[found]
    return True


def _disagree(evidence: Evidence, wrong: Sequence[int]) -> Said | None:
    """Ranks that should hold the same and do not, each with values of its own."""
    size, expected, given = evidence.size, evidence.expected, evidence.given
    if size < 2 or not all(same(expected[rank], expected[0]) for rank in range(size)):
        return None
    alike = [rank for rank in range(size) if same(given[rank], given[0])]
    if len(alike) == size:
        return None
    others = [rank for rank in range(size) if rank not in alike]
    return Said(
        f"{_capital(evidence.label.en)} should be the same on all ranks, but it differs between {_en(alike)} and "
        f"{_en(others)}: look for a different random state, data that differ where they should not, or a broadcast or "
        "all-reduce that leaves some ranks out.",
        f"Tous les rangs devraient détenir la même chose ({evidence.label.fr}), mais {_fr(alike)} et "
        f"{_fr(others)} diffèrent : cherchez un état aléatoire différent, des données qui diffèrent à tort, ou un "
        "broadcast ou un all-reduce qui oublie des rangs.",
    )


def _difference(evidence: Evidence, wrong: Sequence[int]) -> Said:
    gaps = {rank: float((evidence.given[rank] - evidence.expected[rank]).abs().max()) for rank in wrong}
    rank = max(gaps, key=lambda rank: gaps[rank])
    gap = f"{gaps[rank]:.2g}"
    en, fr = _en(wrong), _fr(wrong)
    return Said(
        f"{_capital(evidence.label.en)} is wrong on {en}: up to {gap} away from what one process computes (rank "
        f"{rank}).",
        f"{_capital(evidence.label.fr)} : valeurs fausses sur {fr}, jusqu’à {gap.replace('.', ',')} d’écart avec ce "
        f"que calcule un seul processus (rang {rank}).",
    )


def _all(evidence: Evidence, way: Callable[[int], Tensor]) -> bool:
    return all(same(evidence.given[rank], way(rank)) for rank in range(evidence.size))


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _plain(words: str) -> str:
    return words.removeprefix("the ")
