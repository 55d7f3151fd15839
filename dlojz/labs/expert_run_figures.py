"""Figures and tables of lab 10 that need a training: loads of experts, memory and messages, experts over links.

Layer 6 (labs), on `dlojz.viz`. Invariant: what was measured stands beside what the package predicts; nothing is fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dlojz.labs.expert_trials import EXPERTS, Trial, train_mixture
from dlojz.labs.pipeline_figures import Picture, Sheet, or_to_do, percent, pictured, plain_number
from dlojz.labs.run_bars import memory_and_messages
from dlojz.labs.tensor_volume_exercises import NETWORK, NVLINK
from dlojz.text import say
from dlojz.viz.canvas import LabFigure
from dlojz.viz.expert_load_figure import expert_load_figure

if TYPE_CHECKING:
    from dlojz.runs import Run

__all__ = ["Trial", "loads", "loads_table", "over_links", "side_by_side", "train_mixture"]

ExchangeBytes = Callable[[int, int, int, int, float, int, int], float]
TOKENS, WIDTH, MLP_WIDTH, TOP_K, FACTOR, RANKS, NUMBER_BYTES = 4096, 4096, 14336, 2, 1.25, 8, 2
"""A layer of Mixtral 8x7B (Jiang et al. 2024, arXiv 2401.04088), one expert on each of 8 GPUs, in bf16."""
FLOPS_PER_S = 200e12
"""What a GPU sustains in bf16; about half of what its data sheet promises."""


def _name(trial: Trial) -> str:
    if not trial.balance_loss:
        return say(en="without balance loss", fr="sans perte d’équilibrage")
    weight = plain_number(trial.balance_loss)
    return say(en=f"with it, weight {weight}", fr=f"avec elle, poids {weight}")


def loads(*trials: Trial) -> Picture:
    """The load of each expert of the last mixture, step by step, a column for each training."""
    return Picture(expert_load_figure({_name(trial): trial.loads for trial in trials}))


def loads_table(*trials: Trial) -> Sheet:
    """What each training did with its tokens, mean over its steps and mixtures."""
    rows = tuple(
        (
            _name(trial),
            percent(trial.busiest_share),
            plain_number(trial.idle_experts, 2),
            percent(trial.dropped_share),
        )
        for trial in trials
    )
    head = (
        say(en="training", fr="entraînement"),
        say(en="busiest expert", fr="expert le plus chargé"),
        say(en=f"idle experts, of {EXPERTS}", fr=f"experts oisifs, sur {EXPERTS}"),
        say(en="tokens dropped", fr="tokens abandonnés"),
    )
    return Sheet(head, rows)


def _title(run: Run) -> str:
    layout = run.config.layout
    return f"{layout.title} ×{layout.world_size}" if layout.ep == 1 else layout.title


@pictured
def side_by_side(runs: Sequence[Run]) -> LabFigure:
    """Rank 0 of runs: memory by category, and bytes sent by collective; predicted in pale above.

    Raises:
        LabError: if a run was not measured.
    """
    opening = say(
        en="Memory by category and bytes sent by collective, predicted and measured, of: ",
        fr="Mémoire par catégorie et octets envoyés par communication, prédits et mesurés, pour : ",
    )
    titles = [_title(run) for run in runs]
    return memory_and_messages(runs, titles, opening=opening, shown=lambda one: one.group != "control", ncols=4)


def expert_seconds() -> float:
    """Seconds of the experts' products in one layer of `TOKENS` tokens, forward and backward.

    Each choice meets three matrices, D × F, once in forward and twice in backward, 2 FLOPs a number.
    """
    return 3 * 2 * TOP_K * TOKENS * 3 * WIDTH * MLP_WIDTH / FLOPS_PER_S


@or_to_do
def over_links(exchange_bytes: ExchangeBytes) -> Sheet:
    """A layer of Mixtral on 8 GPUs: its experts' time, and that of the student's bytes over two links."""
    sent = exchange_bytes(TOKENS, WIDTH, EXPERTS, TOP_K, FACTOR, RANKS, NUMBER_BYTES)
    computing = expert_seconds()
    rows = []
    for name, link in (("NVLink", NVLINK), (say(en="network", fr="réseau"), NETWORK)):
        seconds = sent / link.bytes_per_s
        rate = plain_number(link.bytes_per_s / 1e9)
        rows.append(
            (
                name,
                say(en=f"{rate} GB/s", fr=f"{rate} Go/s"),
                f"{plain_number(1e3 * seconds, 3)} ms",
                f"{plain_number(1e3 * computing, 3)} ms",
                percent(seconds / (seconds + computing)),
            )
        )
    head = (
        say(en="link", fr="lien"),
        say(en="bandwidth", fr="débit"),
        say(en="all-to-all", fr="all-to-all"),
        say(en="experts", fr="experts"),
        say(en="share of the two", fr="part dans le total"),
    )
    return Sheet(head, tuple(rows))
