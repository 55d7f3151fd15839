"""What the catalogue tells of each schedule: title, source, what limits it, and which function writes its order.

Layer 2. Invariant: an entry is data; the function that it names is loaded when the schedule is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from dlojz.text import say

Family = Literal["synchronous", "asynchronous"]


@dataclass(frozen=True)
class Entry:
    """One schedule of the catalogue.

    Attributes:
        name: how it is asked for.
        title: its name in the reader's language.
        source: where it was published.
        limits: what limits it, in one sentence.
        function: the function under `dlojz.pipeline.orders` that writes it, as "module.function".
        family: whether the optimizer waits for the whole batch, or stages update while micro-batches are in flight.
        chunks: stages that a rank holds, unless asked otherwise.
        options: what the function takes besides ranks and micro-batches.
        even_ranks: whether an odd number of ranks is refused.
        torch_class: the class of `torch.distributed.pipelining` that runs it; None where torch has none.
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
    Entry(
        "naive",
        _said("naive model parallelism", "parallélisme de modèle naïf"),
        "Huang et al. 2019, arXiv 1811.06965, Fig. 2b",
        _said("one rank works at a time, all others wait", "un rang travaille à la fois, les autres attendent"),
        "flush.naive",
    ),
    Entry(
        "gpipe",
        lambda: "GPipe",
        "Huang et al. 2019, arXiv 1811.06965",
        _said("every rank keeps all micro-batches", "chaque rang garde tous les micro-batches"),
        "flush.gpipe",
        options=("lifo",),
        torch_class="ScheduleGPipe",
    ),
    Entry(
        "1f1b",
        lambda: "1F1B (DAPPLE, PipeDream-Flush)",
        "Fan et al. 2021, arXiv 2007.01045; Narayanan et al. 2021, arXiv 2006.09503",
        _said(
            "GPipe's bubble with less memory; latency is exposed at every change between forward and backward",
            "la bulle de GPipe pour moins de mémoire ; la latence apparaît à chaque changement de sens",
        ),
        "flush.one_f_one_b",
        torch_class="Schedule1F1B",
    ),
    Entry(
        "eager-1f1b",
        _said("eager 1F1B", "1F1B anticipé (eager)"),
        "Zhuang et al. 2023, arXiv 2211.05322",
        _said(
            "hides latency for nearly twice the memory of 1F1B, and needs 2p − 1 micro-batches to do so",
            "masque la latence pour presque deux fois la mémoire de 1F1B, à partir de 2p − 1 micro-batches",
        ),
        "flush.eager_one_f_one_b",
    ),
    Entry(
        "interleaved",
        _said("interleaved 1F1B", "1F1B entrelacé"),
        "Narayanan et al. 2021, arXiv 2104.04473",
        _said(
            "v times as many messages, and more activations in flight",
            "v fois plus de messages, et davantage d’activations en cours",
        ),
        "interleaved.interleaved",
        chunks=2,
        options=("chunks", "group"),
        torch_class="ScheduleInterleaved1F1B",
    ),
    Entry(
        "looped-bfs",
        _said("looped breadth-first", "largeur d’abord, en boucle"),
        "Lamy-Poirier 2023, arXiv 2211.05953",
        _said(
            "keeps the activations of all micro-batches, as GPipe does; meant for fully sharded weights",
            "garde les activations de tous les micro-batches, comme GPipe ; pensé pour des poids entièrement partagés",
        ),
        "interleaved.looped_bfs",
        chunks=2,
        options=("chunks",),
        torch_class="ScheduleLoopedBFS",
    ),
    Entry(
        "interleaved-zb",
        _said("interleaved zero bubble", "zero bubble entrelacé"),
        f"{_ZERO_BUBBLE}, §2.1; torch",
        _said(
            "v times as many messages; the backward must be split",
            "v fois plus de messages ; la passe arrière doit être découpée",
        ),
        "interleaved.interleaved_zero_bubble",
        chunks=2,
        options=("chunks", "group"),
        torch_class="ScheduleInterleavedZeroBubble",
    ),
    Entry(
        "chimera",
        lambda: "Chimera",
        "Li and Hoefler 2021, arXiv 2107.06925",
        _said(
            "every stage lives on two ranks: twice the weights, and an all-reduce of each pair",
            "chaque étage vit sur deux rangs : deux fois les poids, et un all-reduce par paire",
        ),
        "chimera.chimera",
        chunks=2,
        even_ranks=True,
    ),
    Entry(
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
    Entry(
        "zb-h2",
        lambda: "ZB-H2",
        f"{_ZERO_BUBBLE}, §2.2",
        _said(
            "nearly twice the memory of 1F1B, and no gain over ZB-H1 if the optimizer is a barrier",
            "presque deux fois la mémoire de 1F1B, et aucun gain sur ZB-H1 si l’optimiseur est une barrière",
        ),
        "zero_bubble.zb_h2",
    ),
    Entry(
        "zb-1p",
        _said("automatic zero bubble, 1F1B's memory (ZB-1p)", "zero bubble automatique, mémoire de 1F1B (ZB-1p)"),
        f"{_ZERO_BUBBLE}, §3.1",
        _said(
            "a heuristic under a limit of p micro-batches: not proven to be the best order",
            "une heuristique sous une limite de p micro-batches : rien ne prouve que l’ordre soit le meilleur",
        ),
        "zero_bubble_memory.zero_bubble",
        options=("memory_limit", "costs"),
    ),
    Entry(
        "zb-2p",
        _said("automatic zero bubble, twice that memory (ZB-2p)", "zero bubble automatique, deux fois plus (ZB-2p)"),
        f"{_ZERO_BUBBLE}, §3.1",
        _said(
            "a heuristic under a limit of 2p micro-batches; gains only where no barrier ends the step",
            "une heuristique sous une limite de 2p micro-batches ; ne gagne que si aucune barrière ne clôt le pas",
        ),
        "zero_bubble_memory.zero_bubble",
        options=("memory_limit", "costs"),
    ),
    Entry(
        "zb-v",
        lambda: "ZB-V",
        f"{_ZERO_BUBBLE}, §6",
        _said(
            "exactly two chunks per rank; no bubble only where F = I = W and no barrier ends the step",
            "exactement deux étages par rang ; sans bulle seulement si F = I = W et sans barrière en fin de pas",
        ),
        "v_shape.zb_v",
        chunks=2,
        torch_class="ScheduleZBVZeroBubble",
    ),
    Entry(
        "dualpipe",
        lambda: "DualPipe",
        "DeepSeek-AI 2024, arXiv 2412.19437, §3.2.1",
        _said(
            "every stage lives on two ranks; gains where forward and backward hide each other's communication",
            "chaque étage vit sur deux rangs ; gagne si passes avant et arrière masquent leurs communications",
        ),
        "dualpipe.dualpipe",
        chunks=2,
        even_ranks=True,
    ),
    Entry(
        "dualpipe-v",
        lambda: "DualPipeV",
        "github.com/deepseek-ai/DualPipe, dualpipev.py",
        _said(
            "two chunks per rank and at least 2p micro-batches; gains from overlapping, as DualPipe",
            "deux étages par rang et au moins 2p micro-batches ; gagne par recouvrement, comme DualPipe",
        ),
        "dualpipe.dualpipe_v",
        chunks=2,
        torch_class="ScheduleDualPipeV",
    ),
    Entry(
        "hanayo",
        _said("Hanayo (waves)", "Hanayo (vagues)"),
        "Liu et al. 2023, arXiv 2308.15762",
        _said(
            "2W chunks per rank, so nearly 2W times as many messages",
            "2W étages par rang, donc presque 2W fois plus de messages",
        ),
        "hanayo.hanayo",
        chunks=2,
        options=("waves", "costs"),
    ),
    Entry(
        "terapipe",
        _said("TeraPipe (token slices)", "TeraPipe (tranches de tokens)"),
        "Li et al. 2021, arXiv 2102.07988",
        _said(
            "causal attention only, and all activations are kept, as in GPipe",
            "attention causale seulement, et toutes les activations sont gardées, comme dans GPipe",
        ),
        "terapipe.terapipe",
        options=("token_slices",),
    ),
    Entry(
        "bpipe",
        _said("BPipe (balanced memory)", "BPipe (mémoire équilibrée)"),
        "Kim et al. 2023, ICML (BPipe)",
        _said(
            "activations travel to a partner and back: a fast link is needed between the two",
            "des activations vont chez un partenaire et en reviennent : il faut entre les deux un lien rapide",
        ),
        "bpipe.bpipe",
    ),
    Entry(
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
    Entry(
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
    Entry(
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
    Entry(
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
