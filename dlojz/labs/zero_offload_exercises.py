"""Lab 04: offloading: what lies where, and whether the way there and back can be hidden.

Layer 6 (labs). Invariant: the bytes are those of `dlojz.predict.state_forms`; the time is a ratio, whatever the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.judging import Mistake, by_reference
from dlojz.labs.verdict import Said
from dlojz.text import say

Pair = tuple[float, float]
FLOPS_PER_TOKEN = 6
"""Per parameter: 2 in forward, 4 in backward (Kaplan et al. 2020, arXiv 2001.08361, §2.1)."""


def offload_bytes(parameters: float, ranks: int, offload: str) -> Pair:
    """Bytes of the model states of one rank on the device and in host memory: ZeRO-3, mixed precision, Adam.

    On the host the update works in fp32: master copy, gradient and two moments, 4 + 4 + 8 bytes.

    Source: Rajbhandari et al. 2021, "ZeRO-Infinity" (arXiv 2104.07857), §5.1; DeepSpeed 0.19 `runtime/zero/stage3.py`,
    which keeps the gradient on the host in fp32.
    """
    device, host = {"none": (16, 0), "optimizer": (2, 16), "parameters": (0, 18)}[offload]
    return device * parameters / ranks, host * parameters / ranks


def _cases() -> Iterator[tuple[int, int, str]]:
    for parameters, ranks in ((8_000, 4), (13_000_000, 1), (960, 6)):
        for offload in ("optimizer", "none", "parameters"):
            yield parameters, ranks, offload


_BYTES_MISTAKES: tuple[tuple[Callable[[float, int, str], Pair], Said], ...] = (
    (
        lambda p, n, offload: offload_bytes(p, n, offload)[::-1],
        Said(
            "The two numbers are right, but swapped: first the device, then the host.",
            "Les deux nombres sont justes, mais intervertis : d’abord le GPU, ensuite la mémoire de l’hôte.",
        ),
    ),
    (
        lambda p, n, offload: _parts(p, n, offload, {"none": (16, 0), "optimizer": (2, 12), "parameters": (0, 14)}),
        Said(
            "The gradient is missing on the host: it is updated there, in fp32, so it takes 4 bytes per parameter "
            "there.",
            "Il manque le gradient du côté de l’hôte : la mise à jour s’y fait en fp32, il y prend donc 4 octets par "
            "paramètre.",
        ),
    ),
    (
        lambda p, n, offload: _parts(p, n, offload, {"none": (16, 0), "optimizer": (2, 14), "parameters": (0, 16)}),
        Said(
            "On the host the gradient is kept in fp32, as the update is done there: 4 bytes per parameter, not 2.",
            "Chez l’hôte, le gradient est gardé en fp32, puisque la mise à jour s’y fait : 4 octets par paramètre, et "
            "non 2.",
        ),
    ),
    (
        lambda p, n, offload: _parts(p, n, offload, {"none": (16, 0), "optimizer": (4, 12), "parameters": (2, 14)}),
        Said(
            "The gradients do not stay on the device: each leaves for the host as soon as it is reduced, as the "
            "update is done there.",
            "Les gradients ne restent pas sur le GPU : chacun part vers l’hôte dès qu’il est réduit, puisque la mise à "
            "jour s’y fait.",
        ),
    ),
    (
        lambda p, n, offload: _parts(p, 1, offload, {"none": (16, 0), "optimizer": (2, 16), "parameters": (0, 18)}),
        Said(
            "These are the bytes of the whole model; with ZeRO-3 each rank has one N-th of them, on the host too.",
            "Ce sont les octets du modèle entier ; avec ZeRO-3, chaque rang n’en a qu’un N-ième, chez l’hôte aussi.",
        ),
    ),
    (
        lambda p, n, offload: (
            {"none": 16 / n, "optimizer": 2.0, "parameters": 0.0}[offload] * p,
            offload_bytes(p, n, offload)[1],
        ),
        Said(
            "The weights on the device are not whole: with ZeRO-3 each rank keeps one N-th of them.",
            "Les poids sur le GPU ne sont pas entiers : avec ZeRO-3, chaque rang n’en garde qu’un N-ième.",
        ),
    ),
)


def _parts(p: float, n: int, offload: str, each: dict[str, tuple[int, int]]) -> Pair:
    device, host = each[offload]
    return device * p / n, host * p / n


def _close(value: float, right: float) -> bool:
    return abs(value - right) <= 1e-9 * abs(right)


def _judge_bytes(answer: Callable[..., Any]) -> None:
    cases = list(_cases())
    given = [_pair(answer(*case)) for case in cases]
    expected = [offload_bytes(*case) for case in cases]

    def all_same(others: list[Pair]) -> bool:
        return all(
            _close(a, b) for one, other in zip(given, others, strict=True) for a, b in zip(one, other, strict=True)
        )

    if all_same(expected):
        return
    for way, says in _BYTES_MISTAKES:
        if all_same([way(*case) for case in cases]):
            raise Wrong(str(says))
    for case, mine, right in zip(cases, given, expected, strict=True):
        if not all(map(_close, mine, right)):
            asked = ", ".join(map(repr, case))
            raise Wrong(
                say(
                    en=f"For the arguments ({asked}), {right[0]:g} bytes on the device and {right[1]:g} on the host "
                    f"are expected, but your function returns {mine[0]:g} and {mine[1]:g}.",
                    fr=f"Pour les arguments ({asked}), on attend {right[0]:g} octets sur le GPU et {right[1]:g} chez "
                    f"l’hôte, mais votre fonction renvoie {mine[0]:g} et {mine[1]:g}.",
                )
            )


def _pair(value: object) -> Pair:
    if value is None:
        raise Wrong(
            say(
                en="Your function returns nothing: end it with return.",
                fr="Votre fonction ne renvoie rien : terminez-la par return.",
            )
        )
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise Wrong(
            say(
                en="Two numbers are expected: bytes on the device, bytes in host memory.",
                fr="Deux nombres sont attendus : les octets sur le GPU, puis les octets dans la mémoire de l’hôte.",
            )
        )
    return float(value[0]), float(value[1])


OFFLOAD_BYTES = Exercise(
    id="offload-bytes",
    title=Said("what lies where", "ce qui se trouve où"),
    judge=_judge_bytes,
    praise=Said(
        "Right. The host gives more than the device saves: 16 bytes for 14, as gradients are in fp32 there.",
        "Exact. L’hôte fournit plus que le GPU n’économise : 16 octets pour 14, car les gradients y sont en fp32.",
    ),
    hints=(
        Said(
            "List what the update on the host works with, in fp32: four numbers per parameter. What does the device "
            "still compute with?",
            "Faites la liste de ce dont la mise à jour a besoin chez l’hôte, en fp32 : quatre nombres par paramètre. "
            "Et avec quoi le GPU calcule-t-il encore ?",
        ),
        Said(
            "Per parameter, over the number of ranks: none 16 and 0, optimizer 2 and 4 + 4 + 8, parameters 0 and that "
            "plus 2.",
            "Par paramètre, à diviser par le nombre de rangs : none, 16 et 0 ; optimizer, 2 et 4 + 4 + 8 ; parameters, "
            "0 et la même chose plus 2.",
        ),
    ),
)


def transfer_over_compute(ranks: int, tokens: float, flops_per_s: float, pcie_bytes_per_s: float) -> float:
    """Seconds that gradients and weights take between device and host, over those that forward and backward take.

    Each rank sends its share of the gradients, 2Ψ/N bytes, and receives its share of the weights, 2Ψ/N; it computes
    6Ψ operations per token. Ψ cancels.

    Source: Ren et al. 2021, "ZeRO-Offload" (arXiv 2101.06840), §4.2.2: 4 bytes per parameter and step.
    """
    return _ratio(4, ranks, tokens, flops_per_s, pcie_bytes_per_s)


def _ratio(
    each: float, n: float, tokens: float, flops: float, pcie: float, per_token: float = FLOPS_PER_TOKEN
) -> float:
    return (each / n / pcie) / (per_token * tokens / flops)


def _machines() -> Iterator[tuple[int, float, float, float]]:
    yield 4, 1000.0, 1e9, 1e6
    yield 1, 200.0, 4e6, 2e4
    yield 8, 5000.0, 6e8, 3e3


OFFLOAD_TIME = Exercise(
    id="offload-time",
    title=Said("when offloading pays", "quand le déchargement est rentable"),
    judge=by_reference(
        transfer_over_compute,
        cases=_machines,
        mistakes=(
            Mistake(
                lambda n, tokens, flops, pcie: 1 / _ratio(4, n, tokens, flops, pcie),
                Said(
                    "It is the other way round: the seconds of the transfers over those of the computation.",
                    "C’est l’inverse : les secondes de transfert, divisées par celles du calcul.",
                ),
            ),
            Mistake(
                lambda n, tokens, flops, pcie: _ratio(2, n, tokens, flops, pcie),
                Said(
                    "That is one direction: gradients go down, and updated weights come back up.",
                    "Cela ne compte qu’un sens : les gradients descendent, et les poids mis à jour remontent.",
                ),
            ),
            Mistake(
                lambda n, tokens, flops, pcie: _ratio(4, 1, tokens, flops, pcie),
                Said(
                    "Each rank transfers its own share only, one N-th: every GPU has a link of its own to the host.",
                    "Chaque rang ne transfère que sa part, un N-ième : chaque GPU a son propre lien vers l’hôte.",
                ),
            ),
            Mistake(
                lambda n, tokens, flops, pcie: _ratio(8, n, tokens, flops, pcie),
                Said(
                    "The transfers are in 16 bit, 2 bytes each way: the conversion to fp32 is done on the host.",
                    "Les transferts se font sur 16 bits, 2 octets dans chaque sens : la conversion en fp32 a lieu chez "
                    "l’hôte.",
                ),
            ),
            Mistake(
                lambda n, tokens, flops, pcie: _ratio(16, n, tokens, flops, pcie),
                Said(
                    "Moments and master copy never travel: they are updated where they lie. Only gradients go down, "
                    "and weights up.",
                    "Les moments et la copie maître ne voyagent jamais : ils sont mis à jour là où ils se trouvent. "
                    "Seuls les gradients descendent, et les poids remontent.",
                ),
            ),
            Mistake(
                lambda n, tokens, flops, pcie: _ratio(4, n, tokens, flops, pcie, 2),
                Said(
                    "You count the forward pass alone, 2 operations per parameter and token: with backward there are "
                    "6.",
                    "Vous ne comptez que la passe avant, 2 opérations par paramètre et par token : avec la passe "
                    "arrière, il y en a 6.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right, and the size of the model has gone: what counts is how much each GPU computes between two updates.",
        "Exact, et la taille du modèle a disparu : ce qui compte, c’est le calcul de chaque GPU entre deux mises à "
        "jour.",
    ),
    hints=(
        Said(
            "For Ψ parameters: how many bytes does a rank send and receive, and how many operations does it compute? "
            "Ψ cancels.",
            "Pour Ψ paramètres : combien d’octets un rang envoie-t-il et reçoit-il, et combien d’opérations "
            "calcule-t-il ? Ψ s’élimine.",
        ),
        Said(
            "Transfers: (2 + 2) / ranks / pcie_bytes_per_s. Computation: 6 · tokens / flops_per_s.",
            "Transferts : (2 + 2) / ranks / pcie_bytes_per_s. Calcul : 6 · tokens / flops_per_s.",
        ),
    ),
)
