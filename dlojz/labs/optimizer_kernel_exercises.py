"""Lab 09: what an update reads and writes, operation by operation and in one kernel.

Layer 6 (labs). Invariant: bytes per parameter are counted, not measured; a temporary tensor of a fused kernel stays in
registers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dlojz.labs.exercise import Exercise
from dlojz.labs.judging import Mistake
from dlojz.labs.optimizer_trials import by_trial, pair_of
from dlojz.labs.verdict import Said

if TYPE_CHECKING:
    from torch import Tensor

Operation = tuple[Sequence[str], Sequence[str]]
"""Names of the tensors that it reads, and of those that it writes."""
BYTES = 4

ADAM: tuple[Operation, ...] = (
    (("m", "g"), ("m",)),
    (("v",), ("v",)),
    (("v", "g", "g"), ("v",)),
    (("v",), ("t",)),
    (("t",), ("t",)),
    (("t",), ("t",)),
    (("p", "m", "t"), ("p",)),
)
"""`m.lerp_(g, …)`, `v.mul_(…)`, `v.addcmul_(g, g, …)`, `t = v.sqrt()`, `t.div_(…)`, `t.add_(eps)`,
`p.addcdiv_(m, t, …)`: as torch's Adam for one tensor."""
ADAM_STATES = ("p", "g", "m", "v")


def update_traffic(operations: Sequence[Operation], states: Collection[str]) -> tuple[int, int]:
    """Bytes per parameter that an update moves between memory and the processor, in fp32.

    Args:
        operations: in order.
        states: tensors that are there before and after; all others are temporary.

    Returns:
        one kernel per operation; one kernel for all, which reads and writes each state at most once.

    Source: Jiang et al. 2021, "Optimizer Fusion" (arXiv 2104.00237), for locality as what fusion gains; the count is
    ours.
    """
    apart = sum(len(set(reads)) + len(set(writes)) for reads, writes in operations)
    read: set[str] = set()
    written: set[str] = set()
    for reads, writes in operations:
        read |= {name for name in reads if name in states} - written
        written |= {name for name in writes if name in states}
    return BYTES * apart, BYTES * (len(read) + len(written))


def _count(answer: Callable[..., Any], operations: Sequence[Operation], states: Collection[str]) -> Tensor:
    import torch

    apart, together = pair_of(answer(list(operations), set(states)), "(separate, fused)")
    return torch.tensor([float(apart), float(together)])


def _cases() -> Iterator[tuple[Sequence[Operation], Collection[str]]]:
    yield ADAM, ADAM_STATES
    yield ((("b", "g"), ("b",)), (("p", "b"), ("p",))), ("p", "g", "b")  # momentum
    # The update itself is kept: written first, read afterwards, never needed from before.
    yield ((("g", "m"), ("u",)), (("u", "u"), ("s",)), (("s", "u"), ("m",)), (("p", "m", "u"), ("p",))), (*"pgmu",)


def _apart(operations: Sequence[Operation], states: Collection[str]) -> int:
    return update_traffic(operations, states)[0]


def _together(operations: Sequence[Operation], states: Collection[str]) -> int:
    return update_traffic(operations, states)[1]


def _all_names(operations: Sequence[Operation], states: Collection[str]) -> int:
    everything = {name for reads, writes in operations for name in (*reads, *writes)}
    return update_traffic(operations, everything)[1]


def _names(operations: Sequence[Operation], states: Collection[str], which: int) -> int:
    return BYTES * len({name for operation in operations for name in operation[which] if name in states})


FUSED_TRAFFIC = Exercise(
    id="fused-traffic",
    title=Said("an update in one kernel", "une mise à jour en un seul noyau"),
    judge=by_trial(
        _count,
        update_traffic,
        cases=_cases,
        mistakes=(
            Mistake(
                lambda operations, states: update_traffic(operations, states)[::-1],
                Said(
                    "The two results are swapped: first one kernel per operation, then one for all.",
                    "Les deux résultats sont inversés : d’abord un noyau par opération, puis un seul pour toutes.",
                ),
            ),
            Mistake(
                lambda operations, states: [count // BYTES for count in update_traffic(operations, states)],
                Said(
                    "You count tensors: each moves 4 bytes per parameter.",
                    "Vous comptez des tenseurs : chacun déplace 4 octets par paramètre.",
                ),
            ),
            Mistake(
                lambda operations, states: (
                    BYTES * sum(len(reads) + len(writes) for reads, writes in operations),
                    _together(operations, states),
                ),
                Said(
                    "An operation that names a tensor twice (g · g) reads it once.",
                    "Une opération qui nomme deux fois le même tenseur (g · g) ne le lit qu’une fois.",
                ),
            ),
            Mistake(
                lambda operations, states: (_apart(operations, states), _all_names(operations, states)),
                Said(
                    "Fused, a temporary tensor is never in memory: its numbers stay in the registers. Count the "
                    "states alone.",
                    "Une fois l’opération fusionnée, un tenseur temporaire n’est jamais en mémoire : ses nombres "
                    "restent dans les registres. Ne comptez que les états.",
                ),
            ),
            Mistake(
                lambda operations, states: (
                    _apart(operations, states),
                    _names(operations, states, 0) + _names(operations, states, 1),
                ),
                Said(
                    "A state that is written before it is first read does not come from memory: the kernel has just "
                    "computed it.",
                    "Un état écrit avant d’être lu pour la première fois ne vient pas de la mémoire : le noyau vient "
                    "de le calculer.",
                ),
            ),
            Mistake(
                lambda operations, states: (_apart(operations, states), BYTES * len(states)),
                Said(
                    "You count each state once; one that is read and then changed goes both ways.",
                    "Vous comptez chaque état une fois ; or un état lu puis modifié fait l’aller et le retour.",
                ),
            ),
            Mistake(
                lambda operations, states: (_apart(operations, states), 2 * BYTES * len(states)),
                Said(
                    "You count each state twice; one that is only read (the gradient) does not go back.",
                    "Vous comptez chaque état deux fois ; or un état seulement lu (le gradient) n’est pas réécrit.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right: the operations are the same, but what is moved is not.",
        "Exact : les opérations sont les mêmes, mais pas ce qui est déplacé.",
    ),
    hints=(
        Said(
            "One kernel per operation: everything named, once each (set), read or written. One for all: which states "
            "must come from memory, and which must go back?",
            "Un noyau par opération : tout ce qui est nommé, une fois chacun (set), lu ou écrit. Un seul pour toutes : "
            "quels états doivent venir de la mémoire, et lesquels doivent y retourner ?",
        ),
        Said(
            "Go through the operations with two sets: to `read` add the states read that are not in `written` yet, "
            "then to `written` the states written. Fused: 4 · (len(read) + len(written)).",
            "Parcourez les opérations avec deux ensembles : ajoutez à `read` les états lus qui ne sont pas encore dans "
            "`written`, puis à `written` les états écrits. Fusionné : 4 · (len(read) + len(written)).",
        ),
    ),
)
