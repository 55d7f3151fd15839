"""Tables of lab 00: what a comparison of runs answers, and a replayed run beside one of this machine."""

from dlojz.base.language import say
from dlojz.base.table import Table
from dlojz.compare import Comparison
from dlojz.labs.kit.figures import answered, measured_footprint
from dlojz.running.run import Run


def compared(comparison: Comparison) -> Table:
    """Answer whether the bytes are those predicted, and the losses those of one process."""
    gaps = [row.loss_gap for row in comparison.rows if row.loss_gap is not None]
    return answered(
        [
            (say(en="the bytes communicated are exactly those predicted",
                 fr="les octets communiqués sont exactement ceux qui étaient prédits"),
             # Bytes are compared exactly: both counts are whole numbers of the same messages.
             bool(comparison.exact)),
            (say(en="the losses of the parallel runs are those of one process, within one per mille",
                 fr="les pertes des exécutions parallèles sont celles d’un processus seul, à un pour mille près"),
             bool(gaps) and max(gaps) < 1e-3),
        ]
    )  # fmt: skip


def replay_seen(run: Run, replayed: Run) -> Table:
    """Answer whether a replayed run moved and held the same bytes."""
    run_footprint, replay_footprint = measured_footprint(run), measured_footprint(replayed)
    return answered(
        [
            (say(en="the same bytes communicated", fr="mêmes octets communiqués"),
             run_footprint.communication == replay_footprint.communication),
            (say(en="the same bytes of weights", fr="mêmes octets de poids"),
             run_footprint.memory.weights_bytes == replay_footprint.memory.weights_bytes),
        ]
    )  # fmt: skip
