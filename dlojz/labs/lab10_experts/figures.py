"""Figures and tables of lab 10: places of experts, dropped tokens, all-to-all, loads, links, curriculum.

Inputs are the same in every notebook; a rank has one colour and one hatch in every figure.

Shape suffixes: T tokens, E experts, K choices of a token, D width.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import NullFormatter
from torch import Tensor

from dlojz.base.language import percent, say, shortest, significant
from dlojz.base.table import Table, titles
from dlojz.display.canvas import LabFigure, caption, finish, new_figure, plain
from dlojz.display.figures.run_figures import expert_load_figure
from dlojz.display.style import (
    BLACK,
    EDGE,
    GREY,
    HEADING,
    LINE_STYLES,
    NORMAL,
    ORANGE,
    SKY,
    SMALL,
    VERMILION,
    WHITE,
    Style,
)
from dlojz.hardware.links import NETWORK, NVLINK
from dlojz.labs.kit.exercise import Sentences, or_to_do
from dlojz.labs.kit.figures import SHEET_RANKS, Picture, memory_and_messages, open_figure, pictured
from dlojz.labs.lab10_experts.exercises_routing import capacity
from dlojz.results.record import ExpertLoad
from dlojz.running.run import Run

TEXTS = Sentences(Path(__file__).with_suffix(".md"))

Choose = Callable[["Tensor", int], tuple["Tensor", "Tensor"]]
Place = Callable[["Tensor", int, float], "Tensor"]
ORDERS = (Style(SKY, ""), Style(ORANGE, "//"))
"""First and second choices."""


def crowd(tokens: int, experts: int, crowding: float = 1.0, seed: int = 3) -> Tensor:
    """Make logits of a router, (T, E), that prefers the first experts by `crowding`; 0 is a fair router."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, experts, generator=generator) + crowding * torch.linspace(1, -1, experts)


def _cell(axes: Axes, corner: tuple[float, float], style: Style, text: str, edge: str = EDGE) -> None:
    width = 2.0 if edge == VERMILION else 0.8
    axes.add_patch(
        Rectangle(corner, 0.9, 0.8, facecolor=style.color, hatch=style.hatch, edgecolor=edge, linewidth=width)
    )
    if text:
        axes.text(corner[0] + 0.45, corner[1] + 0.4, text, ha="center", va="center", fontsize=SMALL,
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.85})  # fmt: skip


@pictured
def seats(
    choose: Choose, place_choices: Place, *, tokens: int = 12, experts: int = 4, k: int = 1, factor: float = 1.0
) -> LabFigure:
    """Draw which token has which place of which expert, and which has none, by the student's two functions."""
    _, chosen_TK = choose(crowd(tokens, experts), k)
    places_TK = place_choices(chosen_TK, experts, factor)
    room = capacity(tokens, experts, k, factor)
    lost = [(token, choice) for choice in range(k) for token in range(tokens) if int(places_TK[token, choice]) < 0]
    figure = open_figure(
        9.0,
        0.9 + 0.42 * experts,
        *TEXTS.sentence("seats", "alt", tokens=tokens, experts=experts, room=room, lost_count=len(lost)),
    )
    axes = figure.subplots()
    dropped = [0] * experts
    for expert in range(experts):
        for empty in range(room):
            _cell(axes, (empty, -expert), Style(WHITE, ""), "")
    for choice in range(k):
        for token in range(tokens):
            expert, column = int(chosen_TK[token, choice]), int(places_TK[token, choice])
            if column < 0:
                # dropped: behind the places and a gap, in the order in which they come
                column = room + 1 + dropped[expert]
                dropped[expert] += 1
            edge = VERMILION if column >= room else EDGE
            _cell(axes, (column, -expert), ORDERS[min(choice, 1)], str(token), edge)
    axes.set_yticks([0.4 - expert for expert in range(experts)],
                    [say(en=f"expert {expert}", fr=f"expert {expert}") for expert in range(experts)])  # fmt: skip
    axes.set_xticks([])
    axes.set_xlim(-0.1, max(room + 1 + max(dropped), room + 4))
    axes.set_ylim(-experts + 0.8, 1.0)
    factor_text = shortest(factor)
    title = TEXTS.say("seats", "title", k=k, factor_text=factor_text, room=room)
    axes.set_title(title, loc="left", fontsize=HEADING)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(length=0)
    handles = [
        Rectangle((0, 0), 1, 1, facecolor=style.color, hatch=style.hatch, edgecolor=EDGE) for style in ORDERS[:k]
    ]
    handles += [Rectangle((0, 0), 1, 1, facecolor="white", edgecolor=EDGE),
                Rectangle((0, 0), 1, 1, facecolor="white", edgecolor=VERMILION, linewidth=2)]  # fmt: skip
    names = [say(en="first choice", fr="premier choix"), say(en="second choice", fr="second choix")][:k]
    names += [say(en="empty place", fr="place vide"), say(en="dropped", fr="abandonné")]
    figure.legend(handles, names, frameon=False, loc="outside lower center", ncols=4)
    return finish(figure)


def shares(
    choose: Choose,
    place_choices: Place,
    factor: float,
    crowding: float,
    *,
    tokens: int = 256,
    experts: int = 8,
    k: int = 1,
) -> tuple[float, float]:
    """Return the share of dropped choices, and the share of empty places, from 0 to 1."""
    _, chosen_TK = choose(crowd(tokens, experts, crowding), k)
    placed_count = int((place_choices(chosen_TK, experts, factor) >= 0).sum())
    return 1 - placed_count / (k * tokens), 1 - placed_count / (experts * capacity(tokens, experts, k, factor))


@pictured
def dropped_or_empty(choose: Choose, place_choices: Place) -> LabFigure:
    """Draw dropped tokens and empty places by capacity factor, for a fair and for an unfair router."""
    figure = open_figure(9.0, 3.2, *TEXTS.sentence("dropped or empty", "alt"))
    routers = (
        (say(en="fair router", fr="routeur équitable"), 0.0),
        (say(en="biased router", fr="routeur inégal"), 1.0),
        (say(en="collapsed router", fr="routeur effondré"), 100.0),
    )
    factors = [0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0]
    panels = figure.subplots(1, 2, sharey=True)
    for (label, crowding), (color, line, marker) in zip(routers, LINE_STYLES, strict=False):
        points = [shares(choose, place_choices, factor, crowding) for factor in factors]
        for number, axes in enumerate(panels):
            axes.plot(factors, [100 * point[number] for point in points], color=color, linestyle=line, marker=marker,
                      markersize=5, label=label)  # fmt: skip
    titles = (say(en="tokens dropped", fr="tokens abandonnés"), say(en="empty places", fr="places vides"))
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, loc="left", fontsize=HEADING)
        axes.set_xlabel(say(en="capacity factor", fr="facteur de capacité"))
        axes.axvline(1.25, color=GREY, linestyle="--", linewidth=1)
        plain(axes)
    panels[0].set_ylabel("%")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, frameon=False, loc="outside lower center", ncols=3)
    return finish(figure)


@pictured
def journey(ranks: int = 2, local_experts: int = 2, room: int = 2) -> LabFigure:
    """Draw the rows of each rank before and after the first all-to-all, coloured by their rank.

    Args:
        ranks: 2 to 4.
        room: places that each rank has for each expert.
    """
    experts = ranks * local_experts
    figure = open_figure(9.0, 3.4, *TEXTS.sentence("journey", "alt", ranks=ranks, experts=experts))
    axes = figure.subplots()
    width = room + 2.2
    for rank in range(ranks):
        offset = rank * width
        for expert in range(experts):
            for slot in range(room):
                _cell(axes, (offset + slot, -expert), SHEET_RANKS[rank], "")
        axes.text(offset + room / 2, 1.1, say(en=f"rank {rank}", fr=f"rang {rank}"), ha="center", fontsize=NORMAL)
    start = ranks * width + 2.6
    for rank in range(ranks):
        offset = start + rank * (ranks * room + 1.4)
        for local in range(local_experts):
            expert = rank * local_experts + local
            for source in range(ranks):
                for slot in range(room):
                    _cell(axes, (offset + source * room + slot, -expert), SHEET_RANKS[source], "")
        axes.text(
            offset + ranks * room / 2, 1.1, say(en=f"rank {rank}", fr=f"rang {rank}"), ha="center", fontsize=NORMAL
        )
    middle = ranks * width + 0.2
    for height, text, ends in (
        (0.2, say(en="all-to-all", fr="all-to-all"), (middle - 1.0, middle + 1.8)),
        (-experts + 1.6, say(en="all-to-all\n(the way back)", fr="all-to-all\n(retour)"), (middle + 1.8, middle - 1.0)),
    ):
        axes.annotate("", (ends[1], height), (ends[0], height), arrowprops={"arrowstyle": "->", "color": BLACK})
        axes.text(middle + 0.4, height + 0.15, text, ha="center", va="bottom", fontsize=SMALL)
    axes.set_yticks([0.4 - expert for expert in range(experts)], [f"expert {expert}" for expert in range(experts)])
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.set_xlim(-0.2, start + ranks * (ranks * room + 1.4))
    axes.set_ylim(-experts + 0.8, 1.9)
    for side in axes.spines.values():
        side.set_visible(False)
    handles = [
        Rectangle((0, 0), 1, 1, facecolor=style.color, hatch=style.hatch, edgecolor=EDGE)
        for style in SHEET_RANKS[:ranks]
    ]
    names = [say(en=f"tokens of rank {rank}", fr=f"tokens du rang {rank}") for rank in range(ranks)]
    figure.legend(handles, names, frameon=False, loc="outside lower center", ncols=ranks)
    return finish(figure)


Mix = Callable[["Tensor", "Tensor", "Tensor", "Tensor", Callable[["Tensor"], "Tensor"], tuple[int, int]], "Tensor"]


@or_to_do
def beside_package(choose: Choose, place_choices: Place, mix: Mix) -> Table:
    """Compare the student's three functions with the package's layer and with the dense mixture.

    Factors go up to experts / k, with which no choice is dropped.
    """
    import torch

    from dlojz.models.experts import Routing
    from dlojz.models.experts.layer import MixtureOfExperts

    tokens, experts, k, width = 64, 8, 2, 16
    rows = []
    with torch.random.fork_rng(), torch.no_grad():
        for factor in (0.5, 1.0, experts / k):
            torch.manual_seed(0)
            layer = MixtureOfExperts(width, 2 * width, Routing(experts=experts, top_k=k, capacity_factor=factor))
            for parameter in layer.parameters():
                parameter.normal_(std=0.5)  # large, so that experts and choices differ clearly
            x_TD = torch.randn(tokens, width)
            logits_TE = x_TD @ layer.gate.weight.T
            weights_TK, chosen_TK = choose(logits_TE, k)
            places_TK = place_choices(chosen_TK, experts, factor)
            shape = experts, capacity(tokens, experts, k, factor)
            y_TD = mix(x_TD, weights_TK, chosen_TK, places_TK, layer.experts, shape)
            # every expert on every token, (E, T, D)
            everywhere_ETD = layer.experts(x_TD.expand(experts, -1, -1))
            # of them the chosen ones, by choice and token
            picked_KTD = everywhere_ETD[chosen_TK.T, torch.arange(tokens)]
            dense_TD = (weights_TK.T.unsqueeze(-1) * picked_KTD).sum(0)
            gaps = [
                float((y_TD - reference_TD).abs().max()) for reference_TD in (layer(x_TD.unsqueeze(0))[0], dense_TD)
            ]
            dropped = float((places_TK < 0).float().mean())
            rows.append((significant(factor, 4), percent(dropped), *(_rounded(gap) for gap in gaps)))
    head = titles(*TEXTS.sentence("beside package", "heads"))
    return Table(head, tuple(rows))


def _rounded(gap: float) -> str:
    """A difference with one digit after the point; 0 where it is rounding."""
    return significant(round(gap, 1) if gap > 1e-4 else 0.0, 4)


ExchangeBytes = Callable[[int, int, int, int, float, int, int], float]
TOKENS, WIDTH, MLP_WIDTH, TOP_K, FACTOR, RANKS, NUMBER_BYTES = 4096, 4096, 14336, 2, 1.25, 8, 2
"""A layer of Mixtral 8x7B (Jiang et al. 2024, arXiv 2401.04088), one expert on each of 8 GPUs, in bf16."""
FLOPS_PER_S = 200e12
"""What a GPU sustains in bf16; about half of what its data sheet promises."""


def loads(trainings: Mapping[float, Sequence[Tensor]], factor: float = 1.25) -> Picture:
    """Draw the load of each expert by step, a column for each training.

    Args:
        trainings: by the weight of the balance loss, the choices of each expert, (E), step by step.
        factor: the capacity factor.
    """
    drawn = {}
    for weight, counts in trainings.items():
        weight_text = significant(weight, 4)
        name = say(en=f"balance loss, weight {weight_text}", fr=f"perte d’équilibrage, poids {weight_text}")
        if not weight:
            name = say(en="without balance loss", fr="sans perte d’équilibrage")
        drawn[name] = [_load(step, counts_E.tolist(), factor) for step, counts_E in enumerate(counts)]
    return Picture(expert_load_figure(drawn))


def _load(step: int, counts: list[int], factor: float) -> ExpertLoad:
    # the counts are of choices, k per token: hence k = 1
    room = capacity(sum(counts), len(counts), 1, factor)
    dropped = sum(max(0, count - room) for count in counts) / sum(counts)
    layer = say(en="the last mixture", fr="dernier mélange")
    return ExpertLoad(step=step, layer=layer, tokens=tuple(counts), capacity=room, dropped=dropped)


def _title(run: Run) -> str:
    layout = run.config.layout
    return f"{layout.title} × {layout.world_size}" if layout.ep == 1 else layout.title


@pictured
def side_by_side(runs: Sequence[Run]) -> LabFigure:
    """Draw rank 0 of runs: memory by category, and bytes sent by collective; predicted in pale above.

    Raises:
        LabError: if a run was not measured.
    """
    opening = say(
        en="Memory by category and bytes sent by collective, predicted and measured, of: ",
        fr="Mémoire par catégorie et octets envoyés par communication, prédits et mesurés, pour : ",
    )
    titles = [_title(run) for run in runs]
    return memory_and_messages(
        runs, titles, opening=opening, is_drawn=lambda traffic: traffic.group != "control", ncols=4
    )


def expert_seconds() -> float:
    """Compute the seconds of the experts' products in one layer of `TOKENS` tokens, forward and backward.

    Each place, empty or not, meets three matrices, D × F, once in forward and twice in backward, 2 FLOPs a number.
    """
    return 3 * 2 * FACTOR * TOP_K * TOKENS * 3 * WIDTH * MLP_WIDTH / FLOPS_PER_S


@or_to_do
def over_links(exchange_bytes: ExchangeBytes) -> Table:
    """Compare, for a layer of Mixtral on 8 GPUs, the experts' time with that of the student's bytes."""
    sent_bytes = exchange_bytes(TOKENS, WIDTH, RANKS, TOP_K, FACTOR, RANKS, NUMBER_BYTES)
    computing = expert_seconds()
    rows = []
    for name, link in (("NVLink", NVLINK), (say(en="network", fr="réseau"), NETWORK)):
        seconds = sent_bytes / link.bytes_per_s
        rate = significant(link.bytes_per_s / 1e9, 4)
        rows.append(
            (
                name,
                say(en=f"{rate} GB/s", fr=f"{rate} Go/s"),
                f"{significant(1e3 * seconds)} ms",
                f"{significant(1e3 * computing)} ms",
                percent(seconds / (seconds + computing)),
            )
        )
    head = titles(*TEXTS.sentence("over links", "heads"))
    return Table(head, tuple(rows))


def whole_length(length: object, max_length: int) -> int:
    """Return the length that a pacing function gives, or refuse one that would train nothing, or for ever.

    Raises:
        LabError: unless it is a whole number from 1 to `max_length`.
    """
    if isinstance(length, int | float) and 1 <= length <= max_length and float(length).is_integer():
        return int(length)
    raise TEXTS.refusal("pacing", "length", length=length, max_length=max_length)


@dataclass(frozen=True)
class CurriculumStep:
    """One step of a training whose sequences grow.

    Attributes:
        length: tokens of a sample.
        tokens: read so far.
        seconds: trained so far.
        root: largest √v of Adam.
        held_out: loss on text never trained on; None where it was not measured.
    """

    length: int
    tokens: int
    seconds: float
    root: float
    held_out: float | None


@pictured
def curriculum(trainings: Mapping[str, Sequence[CurriculumStep]]) -> LabFigure:
    """Draw length, held-out loss against tokens and against seconds, and Adam's √v, of several trainings."""
    figure = new_figure(11.5, 6.4, alt=say(
        en="Length of the samples by step, loss on other text by tokens and by seconds, and largest √v by step, of: ",
        fr="Longueur des échantillons par pas, perte sur un autre texte par tokens et par secondes, et plus grand √v "
        "par pas, de : ",
    ) + ", ".join(trainings) + ".")  # fmt: skip
    lengths, roots, by_tokens, by_seconds = figure.subplots(2, 2).flat
    for (name, steps), (color, dashes, marker) in zip(trainings.items(), LINE_STYLES, strict=False):
        line_style = {"color": color, "linestyle": dashes}
        lengths.plot([step.length for step in steps], **line_style, label=name)
        roots.semilogy([step.root for step in steps], **line_style)
        evaluations = [step for step in steps if step.held_out is not None]
        by_tokens.plot(
            [step.tokens for step in evaluations], [step.held_out for step in evaluations], marker=marker, **line_style
        )
        by_seconds.plot(
            [step.seconds for step in evaluations], [step.held_out for step in evaluations], marker=marker, **line_style
        )
    step, loss = say(en="step", fr="pas"), say(en="loss on other text", fr="perte sur un autre texte")
    caption(lengths, x=step, y=say(en="tokens per sample", fr="tokens par échantillon"))
    caption(roots, x=step, y=say(en="largest √v", fr="plus grand √v"))
    caption(by_tokens, x=say(en="tokens read", fr="tokens lus"), y=loss)
    caption(by_seconds, x=say(en="seconds of training", fr="secondes d’entraînement"), y=loss)
    roots.yaxis.set_minor_formatter(NullFormatter())
    for axes in (lengths, roots, by_tokens, by_seconds):
        plain(axes)
    figure.legend(*lengths.get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    return finish(figure)
