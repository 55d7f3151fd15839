"""Figures and tables of lab 10 that need a training: loads of experts, memory and messages, experts over links.

Layer 6 (labs), on `dlojz.viz`. Invariant: what was measured stands beside what the package predicts; nothing is fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from matplotlib.axes import Axes

from dlojz.footprint import CATEGORIES, Footprint
from dlojz.labs.expert_trials import EXPERTS, Trial, train_mixture
from dlojz.labs.pipeline_figures import Picture, Sheet, or_to_do, percent, pictured, plain_number
from dlojz.labs.tensor_volume_exercises import NETWORK, NVLINK
from dlojz.labs.zero_published import decimal
from dlojz.predict import predict
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.units import MEBIBYTE
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.expert_load_figure import expert_load_figure
from dlojz.viz.palette import CATEGORY_STYLES, COLLECTIVE_STYLES, PREDICTED_ALPHA, Style, category_label

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


def _measured(run: Run) -> Footprint:
    footprint = run.record.footprint() if run.record is not None else None
    if footprint is None:
        raise LabError(
            say(
                en=f"the run {run.config.title} was not measured to its end: look at its logs, then run it again.",
                fr=f"l’exécution {run.config.title} n’a pas été mesurée jusqu’au bout : consultez ses journaux, puis "
                "relancez-la.",
            )
        )
    return footprint


@pictured
def side_by_side(runs: Sequence[Run]) -> LabFigure:
    """Rank 0 of runs: memory by category, and bytes sent by collective; predicted in pale above.

    Raises:
        LabError: if a run was not measured.
    """
    pairs = [(predict(run.config), _measured(run)) for run in runs]
    titles = [_title(run) for run in runs]
    opening = say(
        en="Memory by category and bytes sent by collective, predicted and measured, of: ",
        fr="Mémoire par catégorie et octets envoyés par communication, prédits et mesurés, pour : ",
    )
    figure = new_figure(10.0, 1.5 + 0.62 * len(runs), alt=opening + ", ".join(titles))
    memory, sent = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for place, both in enumerate(pairs):
        for footprint, shift, alpha in zip(both, (-0.2, 0.2), (PREDICTED_ALPHA, 1.0), strict=True):
            categories = [(footprint.memory.category(name) or 0, CATEGORY_STYLES[name], category_label(name))
                          for name in CATEGORIES]  # fmt: skip
            messages = [(one.sent_bytes, COLLECTIVE_STYLES[one.collective], one.collective.replace("_", "-"))
                        for one in footprint.communication if one.group != "control"]  # fmt: skip
            _stack(memory, categories, place + shift, alpha)
            _stack(sent, messages, place + shift, alpha)
    memory.set_yticks(range(len(runs)), [title.replace(" (", "\n(") for title in titles])
    memory.invert_yaxis()
    memory.set_xlabel(say(en="rank 0 (MiB)", fr="rang 0 (Mio)"))
    sent.set_xlabel(say(en="sent per step (MiB)", fr="envoyé par pas (Mio)"))
    for axes in (memory, sent):
        axes.xaxis.set_major_formatter(lambda value, position: decimal(f"{value:g}"))
        plain(axes)
        found = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        axes.legend(found.values(), found.keys(), frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0),
                    ncols=4, fontsize=8)  # fmt: skip
    return finish(figure)


def _stack(axes: Axes, parts: Sequence[tuple[float, Style, str]], place: float, alpha: float) -> None:
    left = 0.0
    for num_bytes, style, label in parts:
        size = num_bytes / MEBIBYTE
        if size:
            axes.barh(place, size, left=left, height=0.36, color=style.color, hatch=style.hatch, alpha=alpha,
                      edgecolor="#333333", linewidth=0.4, label=label if alpha == 1.0 else None)  # fmt: skip
        left += size


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
