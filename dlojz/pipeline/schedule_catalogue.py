"""Catalogue of the schedules: title, source, limits and options of each, and `build` by name.

The function that an entry names is loaded when the schedule is built. An option that would change nothing is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from typing import Literal

from dlojz.base.errors import LabError
from dlojz.base.language import one_of, refusal, say
from dlojz.config.layout import Layout
from dlojz.pipeline.schedule import Costs, Schedule
from dlojz.pipeline.simulator import UNIT_COSTS
from dlojz.pipeline.validity import check

Family = Literal["synchronous", "asynchronous"]


@dataclass(frozen=True)
class ScheduleEntry:
    """Entry of the catalogue of schedules.

    Attributes:
        name: key in the catalogue.
        function: function of `dlojz.pipeline.orders` that writes it, as "module.function".
        family: whether the optimizer waits for the whole batch, or stages update while micro-batches are in flight.
        chunks: default stages of a rank.
        options: parameters of the function besides ranks and micro-batches.
        even_ranks: whether an odd number of ranks is refused.
        torch_class: class of `torch.distributed.pipelining` that runs it; None where torch has none.
    """

    name: str
    title: Callable[[], str]
    source: str
    limits: Callable[[], str]
    function: str
    family: Family = "synchronous"
    chunks: int = 1
    options: tuple[str, ...] = ()
    even_ranks: bool = False
    torch_class: str | None = None


def _said(en: str, fr: str) -> Callable[[], str]:
    return lambda: say(en=en, fr=fr)


_ZERO_BUBBLE = "Qi et al. 2024, arXiv 2401.10241"
ENTRIES = (
    ScheduleEntry(
        "naive",
        _said("naive model parallelism", "parallélisme de modèle naïf"),
        "Huang et al. 2019, arXiv 1811.06965, Fig. 2b",
        _said("one rank works at a time, all others wait", "un rang travaille à la fois, les autres attendent"),
        "synchronous.naive",
    ),
    ScheduleEntry(
        "gpipe",
        lambda: "GPipe",
        "Huang et al. 2019, arXiv 1811.06965",
        _said("every rank keeps all micro-batches", "chaque rang garde tous les micro-batches"),
        "synchronous.gpipe",
        options=("lifo",),
        torch_class="ScheduleGPipe",
    ),
    ScheduleEntry(
        "1f1b",
        lambda: "1F1B (DAPPLE, PipeDream-Flush)",
        "Fan et al. 2021, arXiv 2007.01045; Narayanan et al. 2021, arXiv 2006.09503",
        _said(
            "GPipe's bubble with less memory; latency is exposed at every change between forward and backward",
            "la bulle de GPipe pour moins de mémoire ; la latence apparaît à chaque changement de sens",
        ),
        "synchronous.one_f_one_b",
        torch_class="Schedule1F1B",
    ),
    ScheduleEntry(
        "eager-1f1b",
        _said("eager 1F1B", "1F1B anticipé (eager)"),
        "Zhuang et al. 2023, arXiv 2211.05322",
        _said(
            "hides latency for nearly twice the memory of 1F1B, and needs 2p − 1 micro-batches to do so",
            "recouvre la latence pour presque deux fois la mémoire de 1F1B, à partir de 2p − 1 micro-batches",
        ),
        "synchronous.eager_one_f_one_b",
    ),
    ScheduleEntry(
        "interleaved",
        _said("interleaved 1F1B", "1F1B entrelacé"),
        "Narayanan et al. 2021, arXiv 2104.04473",
        _said(
            "over v times as many messages, and more activations in flight",
            "plus de v fois autant de messages, et davantage d’activations en cours",
        ),
        "synchronous.interleaved",
        chunks=2,
        options=("chunks", "group"),
        torch_class="ScheduleInterleaved1F1B",
    ),
    ScheduleEntry(
        "looped-bfs",
        _said("looped breadth-first", "largeur d’abord, en boucle"),
        "Lamy-Poirier 2023, arXiv 2211.05953",
        _said(
            "keeps the activations of all micro-batches, as GPipe does; meant for fully sharded weights",
            "garde les activations de tous les micro-batches, comme GPipe ; pensé pour des poids entièrement répartis",
        ),
        "synchronous.looped_bfs",
        chunks=2,
        options=("chunks",),
        torch_class="ScheduleLoopedBFS",
    ),
    ScheduleEntry(
        "interleaved-zb",
        _said("interleaved zero bubble", "zero bubble entrelacé"),
        f"{_ZERO_BUBBLE}, §2.1; torch",
        _said(
            "over v times as many messages; the backward must be split",
            "plus de v fois autant de messages ; la passe arrière doit être découpée",
        ),
        "synchronous.interleaved_zero_bubble",
        chunks=2,
        options=("chunks", "group"),
        torch_class="ScheduleInterleavedZeroBubble",
    ),
    ScheduleEntry(
        "chimera",
        lambda: "Chimera",
        "Li and Hoefler 2021, arXiv 2107.06925",
        _said(
            "every stage lives on two ranks: twice the weights, and an all-reduce of each pair",
            "chaque étage vit sur deux rangs : deux fois les poids, et un all-reduce par paire",
        ),
        "bidirectional.chimera",
        chunks=2,
        even_ranks=True,
    ),
    ScheduleEntry(
        "zb-h1",
        lambda: "ZB-H1",
        f"{_ZERO_BUBBLE}, §2.1",
        _said(
            "a third of 1F1B's bubble remains when F = I = W; the backward must be split",
            "il reste un tiers de la bulle de 1F1B si F = I = W ; la passe arrière doit être découpée",
        ),
        "zero_bubble.zb_h1",
        torch_class="ScheduleInterleavedZeroBubble",
    ),
    ScheduleEntry(
        "zb-h2",
        lambda: "ZB-H2",
        f"{_ZERO_BUBBLE}, §2.2",
        _said(
            "nearly twice the memory of 1F1B, and no gain over ZB-H1 if the optimizer is a barrier",
            "presque deux fois la mémoire de 1F1B, et aucun gain sur ZB-H1 si l’optimiseur est une barrière",
        ),
        "zero_bubble.zb_h2",
    ),
    ScheduleEntry(
        "zb-1p",
        _said("automatic zero bubble, 1F1B's memory (ZB-1p)", "zero bubble automatique, mémoire de 1F1B (ZB-1p)"),
        f"{_ZERO_BUBBLE}, §3.1",
        _said(
            "a heuristic under a limit of p micro-batches: not proven to be the best order",
            "une heuristique sous une limite de p micro-batches : rien ne prouve que l’ordre soit le meilleur",
        ),
        "zero_bubble.zero_bubble",
        options=("memory_limit", "costs"),
    ),
    ScheduleEntry(
        "zb-2p",
        _said("automatic zero bubble, twice that memory (ZB-2p)", "zero bubble automatique, deux fois plus (ZB-2p)"),
        f"{_ZERO_BUBBLE}, §3.1",
        _said(
            "a heuristic under a limit of 2p micro-batches; gains only where no barrier ends the step",
            "une heuristique sous une limite de 2p micro-batches ; ne gagne que si aucune barrière ne clôt le pas",
        ),
        "zero_bubble.zero_bubble",
        options=("memory_limit", "costs"),
    ),
    ScheduleEntry(
        "zb-v",
        lambda: "ZB-V",
        f"{_ZERO_BUBBLE}, §6",
        _said(
            "exactly two chunks per rank; no bubble only where F = I = W and no barrier ends the step",
            "exactement deux étages par rang ; sans bulle seulement si F = I = W et sans barrière en fin de pas",
        ),
        "zero_bubble.zb_v",
        chunks=2,
        torch_class="ScheduleZBVZeroBubble",
    ),
    ScheduleEntry(
        "dualpipe",
        lambda: "DualPipe",
        "DeepSeek-AI 2024, arXiv 2412.19437, §3.2.1",
        _said(
            "every stage lives on two ranks; gains where forward and backward hide each other's communication",
            "chaque étage vit sur deux rangs ; gagne si passes avant et arrière recouvrent leurs communications",
        ),
        "bidirectional.dualpipe",
        chunks=2,
        even_ranks=True,
    ),
    ScheduleEntry(
        "dualpipe-v",
        lambda: "DualPipeV",
        "github.com/deepseek-ai/DualPipe, dualpipev.py",
        _said(
            "two chunks per rank and at least 2p micro-batches; gains from overlapping, as DualPipe",
            "deux étages par rang et au moins 2p micro-batches ; gagne par recouvrement, comme DualPipe",
        ),
        "bidirectional.dualpipe_v",
        chunks=2,
        torch_class="ScheduleDualPipeV",
    ),
    ScheduleEntry(
        "hanayo",
        _said("Hanayo (waves)", "Hanayo (vagues)"),
        "Liu et al. 2023, arXiv 2308.15762",
        _said(
            "2W chunks per rank, so nearly 2W times as many messages",
            "2W étages par rang, donc presque 2W fois plus de messages",
        ),
        "bidirectional.hanayo",
        chunks=2,
        options=("waves", "costs"),
    ),
    ScheduleEntry(
        "terapipe",
        _said("TeraPipe (token slices)", "TeraPipe (tranches de tokens)"),
        "Li et al. 2021, arXiv 2102.07988",
        _said(
            "causal attention only, and all activations are kept, as in GPipe",
            "attention causale seulement, et toutes les activations sont gardées, comme dans GPipe",
        ),
        "synchronous.terapipe",
        options=("token_slices",),
    ),
    ScheduleEntry(
        "bpipe",
        _said("BPipe (balanced memory)", "BPipe (mémoire équilibrée)"),
        "Kim et al. 2023, ICML (BPipe)",
        _said(
            "activations travel to a partner and back: a fast link is needed between the two",
            "des activations vont chez un partenaire et en reviennent : il faut entre les deux un lien rapide",
        ),
        "synchronous.bpipe",
    ),
    ScheduleEntry(
        "pipedream",
        lambda: "PipeDream (weight stashing)",
        "Narayanan et al. 2019, SOSP (PipeDream)",
        _said(
            "one version of the weights per micro-batch in flight, and gradients of stale weights",
            "une version des poids par micro-batch en cours, et des gradients de poids périmés",
        ),
        "asynchronous.pipedream",
        family="asynchronous",
        options=("stashing",),
    ),
    ScheduleEntry(
        "pipedream-2bw",
        lambda: "PipeDream-2BW",
        "Narayanan et al. 2021, arXiv 2006.09503",
        _said(
            "two weight versions, gradients one batch late", "deux versions des poids, gradients d’un batch en retard"
        ),
        "asynchronous.pipedream_2bw",
        family="asynchronous",
        options=("batch",),
    ),
    ScheduleEntry(
        "pipemare",
        lambda: "PipeMare",
        "Yang et al. 2021, arXiv 1910.05124",
        _said(
            "forward and backward use different weights: the learning rate must be smaller where the delay is longer",
            "passes avant et arrière ont des poids différents : le pas d’apprentissage décroît avec le retard",
        ),
        "asynchronous.pipemare",
        family="asynchronous",
        options=("batch",),
    ),
    ScheduleEntry(
        "ampnet",
        lambda: "AMPNet",
        "Gaunt et al. 2017, arXiv 1705.09786",
        _said(
            "staleness is bounded only by how many micro-batches are in flight",
            "le retard n’est borné que par le nombre de micro-batches en cours",
        ),
        "asynchronous.ampnet",
        family="asynchronous",
        options=("in_flight", "update_every", "costs"),
    ),
)


SCHEDULES: dict[str, ScheduleEntry] = {schedule_entry.name: schedule_entry for schedule_entry in ENTRIES}

ALIASES: dict[str, str] = {
    "dapple": "1f1b",
    "pipedream-flush": "1f1b",
    "deepspeed": "1f1b",
    "interleaved-1f1b": "interleaved",
    "bfs": "looped-bfs",
    "breadth-first": "looped-bfs",
    "interleaved-zero-bubble": "interleaved-zb",
    "zb-v-zero-bubble": "zb-v",
    "2bw": "pipedream-2bw",
}
"""Other names in use; case, hyphens, underscores and spaces do not matter."""

TOKEN_SLICES = 4
"""Default slices of a sequence."""

_LIMITS = {"zb-1p": 1, "zb-2p": 2}
"""Micro-batches per rank that the automatic zero-bubble schedules may keep."""


def entry(name: str) -> ScheduleEntry:
    """Look up the entry of a schedule, by its name or an alias.

    Raises:
        LabError: if there is none; the message lists all names.
    """
    names = {_plain(key): key for key in SCHEDULES} | {_plain(alias): key for alias, key in ALIASES.items()}
    key = names.get(_plain(str(name)))
    if key is None:
        raise LabError(one_of("schedule", name, SCHEDULES))
    return SCHEDULES[key]


def build(
    name: str,
    ranks: int,
    micro_batches: int,
    *,
    chunks: int | None = None,
    token_slices: int | None = None,
    memory_limit: float | None = None,
    waves: int | None = None,
    costs: Costs | None = None,
    **extra_options: object,
) -> Schedule:
    """Build the schedule of that name.

    Args:
        name: a name of `SCHEDULES`, or an alias.
        micro_batches: micro-batches of a step, over all pipes.
        chunks: stages per rank, where the schedule leaves the choice.
        token_slices: slices of each sequence (TeraPipe); 4 by default.
        memory_limit: activations that a rank may keep, in stage-micro-batches; ZB-1p and ZB-2p plan under it (by
            default p and 2p micro-batches), any other schedule is refused if it keeps more.
        waves: Hanayo's waves, two chunks each.
        costs: used by schedules that search for an order (ZB-1p, ZB-2p, Hanayo, AMPNet), and to count memory; F = I
            = W = 1 by default.
        **extra_options: of single schedules (`ScheduleEntry.options`): lifo, group, stashing, batch, in_flight,
            update_every.

    Raises:
        LabError: for an unknown name, an option that the schedule has not, or numbers that do not fit it.
    """
    schedule = entry(name)
    all_options = {"waves": waves, "token_slices": token_slices, **extra_options}
    # None: not given, the schedule has its own default.
    options = {key: value for key, value in all_options.items() if value is not None}
    if chunks is not None:
        options |= _chunks(schedule, chunks, options)
    for option in options:
        if option not in schedule.options:
            raise LabError(_not_an_option(schedule, option))
    reckoned = costs or UNIT_COSTS
    if "costs" in schedule.options:
        options["costs"] = reckoned
    if "token_slices" in schedule.options:
        options.setdefault("token_slices", TOKEN_SLICES)
    planned = "memory_limit" in schedule.options
    if planned:
        units = reckoned.kept_for_input
        # Of unequal stages the largest, so that as many micro-batches fit everywhere.
        default_limit = _LIMITS[schedule.name] * ranks * (max(units) if isinstance(units, tuple) else units)
        options["memory_limit"] = default_limit if memory_limit is None else memory_limit
    module, function = schedule.function.split(".")
    built: Schedule = getattr(import_module(f"dlojz.pipeline.orders.{module}"), function)(
        ranks, micro_batches, **options
    )
    if not built.name.startswith(schedule.name):  # pipedream-vertical says which weights it uses
        built = replace(built, name=schedule.name)
    # `zb-1p` and `zb-2p` have planned under it.
    if memory_limit is not None and not planned:
        check(built, memory_limit, reckoned)
    return built


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter not in "-_ ")


def _chunks(schedule: ScheduleEntry, chunks: int, options: dict[str, object]) -> dict[str, object]:
    """Translate the number of chunks into an option; none, where the schedule has no other number."""
    if "chunks" in schedule.options:
        return {"chunks": chunks}
    if "waves" in schedule.options:
        # Waves that are given as well must agree.
        if chunks >= 2 and chunks % 2 == 0 and options.get("waves", chunks // 2) == chunks // 2:
            return {"waves": chunks // 2}
        raise refusal(
            en=f"{schedule.name} has 2 chunks per wave, but chunks={chunks} was received: give waves instead.",
            fr=f"{schedule.name} a 2 étages par vague, mais chunks={chunks} a été reçu : donnez plutôt waves.",
        )
    if chunks == schedule.chunks:
        return {}
    free = ", ".join(schedule_entry.name for schedule_entry in ENTRIES if "chunks" in schedule_entry.options)
    raise refusal(
        en=f"{schedule.name} has {schedule.chunks} stage(s) per rank, but chunks={chunks} was received: leave "
        f"chunks out, or take a schedule that has the choice ({free}).",
        fr=f"{schedule.name} a {schedule.chunks} étage(s) par rang, mais chunks={chunks} a été reçu : omettez "
        f"chunks, ou prenez un ordonnancement qui laisse le choix ({free}).",
    )


def _not_an_option(schedule: ScheduleEntry, option: str) -> str:
    takers = ", ".join(schedule_entry.name for schedule_entry in ENTRIES if option in schedule_entry.options)
    if not takers:
        return one_of("option", option, sorted({key for schedule_entry in ENTRIES for key in schedule_entry.options}))
    return say(
        en=f"{schedule.name} has no option {option}: leave it out, or take a schedule that has it ({takers}).",
        fr=f"{schedule.name} n’a pas d’option {option} : omettez-la, ou prenez un ordonnancement qui l’a ({takers}).",
    )


def schedule_of(layout: Layout) -> Schedule:
    """Build the schedule of a layout's pipeline ranks.

    Raises:
        LabError: if the schedule does not fit the number of ranks, micro-batches or chunks.
    """
    return _built(layout.schedule or "1f1b", layout.pp, layout.micro_batches, layout.chunks)


@lru_cache(maxsize=8)
def _built(name: str, ranks: int, micro_batches: int, chunks: int | None) -> Schedule:
    """Cache: all ranks of a layout ask for the same schedule."""
    return build(name, ranks, micro_batches, chunks=chunks)
