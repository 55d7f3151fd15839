"""What the lab's own runtimes execute, and what can only be simulated.

Layer 2. Invariant: said before a process is started, without torch. What torch's runtime executes is said by
`torch_csv.torch_refusal`.
"""

from __future__ import annotations

from dlojz.pipeline.action import EVICT, LOAD
from dlojz.pipeline.schedule import Schedule
from dlojz.schema import LabError
from dlojz.text import say

ASYNCHRONOUS = ("pipedream", "pipedream-2bw")
"""Asynchronous schedules that `runtime_asynchronous` executes."""


def check_executable(schedule: Schedule, *, asynchronous: bool = False) -> None:
    """Refuse what the lab's runtimes do not execute.

    Args:
        schedule: any.
        asynchronous: whether the runtime with weight versions is meant.

    Raises:
        LabError: for token slices, evictions, and updates within the step (or, of asynchronous schedules, those whose
            backward uses other weights than its forward).
    """
    reason = None
    if schedule.token_slices > 1:
        reason = say(en="token slices, whose attention needs the slices before them", fr="des tranches de tokens")
    elif any(action.kind in (EVICT, LOAD) for action in schedule.actions):
        reason = say(en="evictions of activations", fr="des évictions d’activations")
    elif schedule.asynchronous and not (asynchronous and schedule.name in ASYNCHRONOUS):
        reason = say(en="updates within the step", fr="des mises à jour au milieu du pas")
    if reason:
        raise LabError(
            say(
                en=f"schedule {schedule.name!r} has {reason}: it is simulated (`dlojz pipeline`), not run. Run e.g. "
                "1f1b, interleaved, zb-h1, chimera or dualpipe, or, with weight versions, pipedream or pipedream-2bw "
                "(engine 'by_hand').",
                fr=f"l’ordonnancement {schedule.name!r} a {reason} : il se simule (`dlojz pipeline`), il ne s’exécute "
                "pas. Exécutez par exemple 1f1b, interleaved, zb-h1, chimera ou dualpipe, ou, avec des versions des "
                "poids, pipedream ou pipedream-2bw (engine='by_hand').",
            )
        )
