"""Lab 06: the two ends of a text model, shared out along the vocabulary: embedding and loss.

Layer 6 (labs). Invariant: an answer is held to the output and the gradients of one process, and then to what it has
sent: neither the table nor the logits are ever gathered.

Shape suffixes: B batch, T tokens, D width, V vocabulary, v = V / n words of one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.tensor_diagnosis import NO_OFFSET, Fault, added, asked_for, by_shares, gathers, gradient, normal
from dlojz.labs.verdict import Said
from dlojz.ranks.forks import RankAnswer
from dlojz.text import say

if TYPE_CHECKING:
    from torch import Tensor

BATCH, TOKENS, WORDS, WIDTH = 2, 6, 12, 4
OUTPUT, OF_TABLE = "output", "gradient of table"
LOSS, OF_LOGITS = "loss", "gradient of logits"
LABELS = {
    OUTPUT: Said("the output", "la sortie"),
    OF_TABLE: Said("the gradient of the table", "le gradient de la table"),
    LOSS: Said("the loss", "la perte"),
    OF_LOGITS: Said("the gradient of the logits", "le gradient des logits"),
}
_NO_MASK = Said(
    "Words of other ranks are not left out: they are looked up as some word of this rank's, and the sum adds them as "
    "well. What this rank finds for them must be 0.",
    "Les mots des autres rangs ne sont pas écartés : ce rang les cherche comme s’ils étaient l’un des siens, et la "
    "somme les ajoute aussi. Ce que ce rang trouve pour eux doit valoir 0.",
)


def _axis() -> Any:
    import torch.distributed as dist

    from dlojz.tensor.axis import TensorAxis

    return TensorAxis(dist.group.WORLD)


def _tokens(seed: int) -> Tensor:
    """Every word at least once, so that no rank is spared."""
    import torch

    return torch.randperm(WORDS, generator=torch.Generator().manual_seed(seed)).view(BATCH, TOKENS)


def _table(seed: int) -> Any:
    return normal(seed, (WORDS, WIDTH), (BATCH, TOKENS, WIDTH))


def _embedding_trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> dict[str, Any]:
    table, coefficients = _table(seed)
    own = table.chunk(size)[rank].clone().requires_grad_()
    y = answer(_tokens(seed), own, _axis())
    if y is not None and y.shape == coefficients.shape and y.requires_grad:
        (y * coefficients).sum().backward()
    return {OUTPUT: y, OF_TABLE: own.grad}


def _looked_up(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    table, coefficients = _table(seed)
    table.requires_grad_()
    y = table[_tokens(seed)]
    (y * coefficients).sum().backward()
    return {OUTPUT: y.detach(), OF_TABLE: gradient(table).chunk(size)[rank]}


def _found(rank: int, size: int, seed: int, way: str) -> Tensor:
    """What one rank finds before the sum."""
    share = WORDS // size
    start = 0 if way == "no offset" else rank * share
    tokens, table = _tokens(seed), _table(seed)[0].chunk(size)[rank]
    elsewhere = (tokens < start) | (tokens >= start + share)
    if way == "clamped":
        clamped: Tensor = table[(tokens - start).clamp(0, share - 1)]
        return clamped
    found: Tensor = table[(tokens - start).masked_fill(elsewhere, 0)]
    return found if way == "first row" else found.masked_fill(elsewhere.unsqueeze(-1), 0.0)


def _added(way: str) -> Callable[[int, int, int], dict[str, Tensor]]:
    return lambda rank, size, seed: {OUTPUT: added(_found(other, size, seed, way) for other in range(size))}


def _inspect_table(answers: list[RankAnswer], size: int) -> None:
    if gathers(answers[0]):
        raise Wrong(
            say(
                en="The output is right, but the ranks' tables or results are gathered: that brings what was shared "
                "out to every rank again. Each looks up its own words, and the zeros of the others leave the sum as "
                "it is.",
                fr="La sortie est juste, mais les tables ou les résultats des rangs sont rassemblés : ce qui était "
                "réparti revient sur chaque rang. Chacun cherche ses propres mots, et les zéros des autres ne changent "
                "pas la somme.",
            )
        )


VOCABULARY_EMBEDDING = Exercise(
    id="vocabulary-embedding",
    title=Said("the embedding by words", "l’embedding par mots"),
    judge=by_shares(
        trial=_embedding_trial,
        expected=_looked_up,
        labels=LABELS,
        faults=(
            Fault(_added("no offset"), NO_OFFSET),
            Fault(_added("first row"), _NO_MASK),
            Fault(_added("clamped"), _NO_MASK),
            Fault(
                lambda rank, size, seed: {OUTPUT: _found(rank, size, seed, "right")},
                Said(
                    "Every rank keeps what it has found itself, zeros for the words of the others: the all-reduce of "
                    "the forward pass is missing.",
                    "Chaque rang garde ce qu’il a trouvé lui-même, des zéros pour les mots des autres : l’all-reduce "
                    "de la passe avant manque.",
                ),
            ),
            Fault(
                lambda *case: {OUTPUT: _looked_up(*case)[OUTPUT], OF_TABLE: case[1] * _looked_up(*case)[OF_TABLE]},
                Said(
                    "The output is right, but the gradient of the table is as many times too large as there are "
                    "ranks: after a sum in forward, nothing is to be sent in backward.",
                    "La sortie est juste, mais le gradient de la table est trop grand d’un facteur égal au nombre de "
                    "rangs : après une somme en passe avant, il n’y a rien à envoyer en passe arrière.",
                ),
            ),
        ),
        inspect=_inspect_table,
    ),
    praise=Said(
        "Right: one rank alone knows each word, the others add zeros; one all-reduce of (B, T, D).",
        "Exact : un seul rang connaît chaque mot, les autres ajoutent des zéros ; un all-reduce de (B, T, D).",
    ),
    hints=(
        Said(
            "start = axis.rank * len(table). Which tokens are this rank's? Look those up, and see to it that the "
            "others give 0.",
            "start = axis.rank * len(table). Quels tokens appartiennent à ce rang ? Cherchez ceux-là, et faites en "
            "sorte que les autres donnent 0.",
        ),
        Said(
            "elsewhere = (tokens < start) | (tokens >= start + len(table)); found = table[(tokens - "
            "start).masked_fill(elsewhere, 0)]; found.masked_fill(elsewhere.unsqueeze(-1), 0), then add_up(…, axis).",
            "elsewhere = (tokens < start) | (tokens >= start + len(table)) ; found = table[(tokens - "
            "start).masked_fill(elsewhere, 0)] ; found.masked_fill(elsewhere.unsqueeze(-1), 0), puis add_up(…, axis).",
        ),
    ),
)


def _logits(seed: int) -> Tensor:
    """Some far larger than exp can bear: without the largest one subtracted, the loss is not finite."""
    (logits,) = normal(seed, (BATCH, TOKENS, WORDS))
    return 40 * logits + 60


def _loss_trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> dict[str, Any]:
    own = _logits(seed).chunk(size, dim=-1)[rank].clone().requires_grad_()
    loss = answer(own, _tokens(seed), _axis())
    if loss is not None and loss.numel() == 1 and loss.requires_grad:
        loss.backward()
    return {LOSS: loss, OF_LOGITS: own.grad}


def _loss(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    import torch.nn.functional as F

    logits = _logits(seed).requires_grad_()
    loss = F.cross_entropy(logits.flatten(0, 1), _tokens(seed).flatten())
    loss.backward()
    return {LOSS: loss.detach(), OF_LOGITS: gradient(logits).chunk(size, dim=-1)[rank]}


def _spoilt_loss(way: str) -> Callable[[int, int, int], dict[str, Tensor]]:
    def values(rank: int, size: int, seed: int) -> dict[str, Tensor]:
        import torch

        share, logits, tokens = WORDS // size, _logits(seed), _tokens(seed)
        sums, targets = [], []
        for other, own in enumerate(logits.chunk(size, dim=-1)):
            largest = (own if way == "own largest" else logits).amax(-1)
            shifted = own - largest.unsqueeze(-1)
            start = 0 if way == "no offset" else other * share
            elsewhere = (tokens < start) | (tokens >= start + share)
            target = shifted.gather(-1, (tokens - start).masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1)
            targets.append(target if way == "no mask" else target.masked_fill(elsewhere, 0.0))
            sums.append(shifted.exp().sum(-1))
        target = targets[rank] if way == "target alone" else torch.stack(targets).sum(0)
        total = sums[rank] if way == "sum alone" else torch.stack(sums).sum(0)
        losses = total.log() - target
        return {LOSS: losses.sum() if way == "not averaged" else losses.mean()}

    return values


def _inspect_logits(answers: list[RankAnswer], size: int) -> None:
    sent = sum(asked_for(answers[0], "all_reduce")) + sum(gathers(answers[0]))
    if gathers(answers[0]) or sent > 4 * BATCH * TOKENS:
        raise Wrong(
            say(
                en="The loss is right, but logits are gathered: of all tensors of the model that is often the largest. "
                "Three numbers per token are enough: the largest logit, the sum of exponentials, the target's logit.",
                fr="La perte est juste, mais des logits sont rassemblés : c’est souvent le plus gros tenseur du "
                "modèle. Trois nombres par token suffisent : le plus grand logit, la somme des exponentielles, le "
                "logit de la cible.",
            )
        )


VOCABULARY_LOSS = Exercise(
    id="vocabulary-loss",
    title=Said("the loss by words", "la perte par mots"),
    judge=by_shares(
        trial=_loss_trial,
        expected=_loss,
        labels=LABELS,
        faults=(
            Fault(
                _spoilt_loss("own largest"),
                Said(
                    "Each rank subtracts its own largest logit: the exponentials of different ranks are then measured "
                    "in different units, and cannot be added. Agree on the largest of all first.",
                    "Chaque rang retranche son propre plus grand logit : les exponentielles des rangs sont alors dans "
                    "des unités différentes, et ne s’additionnent pas. Mettez-vous d’abord d’accord sur le plus grand "
                    "de tous.",
                ),
            ),
            Fault(_spoilt_loss("no offset"), NO_OFFSET),
            Fault(_spoilt_loss("no mask"), _NO_MASK),
            Fault(
                _spoilt_loss("sum alone"),
                Said(
                    "The denominator holds this rank's words only: the sum of exponentials is to be added up over the "
                    "ranks, before the logarithm.",
                    "Le dénominateur ne contient que les mots de ce rang : la somme des exponentielles est à "
                    "additionner sur les rangs, avant le logarithme.",
                ),
            ),
            Fault(
                _spoilt_loss("target alone"),
                Said(
                    "The target's logit is known to one rank only; the others count 0 for it: add it up as well.",
                    "Le logit de la cible n’est connu que d’un rang ; les autres comptent 0 : additionnez-le aussi.",
                ),
            ),
            Fault(
                _spoilt_loss("not averaged"),
                Said(
                    "The loss is a sum over the tokens: return their mean.",
                    "La perte est une somme sur les tokens : renvoyez leur moyenne.",
                ),
            ),
        ),
        inspect=_inspect_logits,
    ),
    praise=Said(
        "Right: three numbers per token cross the ranks, whatever the vocabulary.",
        "Exact : trois nombres par token passent entre les rangs, quel que soit le vocabulaire.",
    ),
    hints=(
        Said(
            "loss = log Σ exp(logit − m) − (logit of the target − m). m: the largest over the ranks (it needs no "
            "gradient). The sum and the target's logit: added up over the ranks, as in the embedding.",
            "perte = log Σ exp(logit − m) − (logit de la cible − m). m : le plus grand sur les rangs (sans gradient). "
            "La somme et le logit de la cible : additionnés sur les rangs, comme dans l’embedding.",
        ),
        Said(
            "m = axis.all_reduce(logits.detach().amax(-1), largest=True). total = add_up((logits - m.unsqueeze(-1))."
            "exp().sum(-1), axis). The target: gather along -1 with (targets - start).masked_fill(elsewhere, 0), zero "
            "elsewhere, add_up. Then (total.log() - target).mean().",
            "m = axis.all_reduce(logits.detach().amax(-1), largest=True). total = add_up((logits - m.unsqueeze(-1))."
            "exp().sum(-1), axis). La cible : gather selon -1 avec (targets - start).masked_fill(elsewhere, 0), zéro "
            "ailleurs, add_up. Enfin (total.log() - target).mean().",
        ),
    ),
)
