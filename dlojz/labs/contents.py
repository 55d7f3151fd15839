"""The labs as a set: in which order, how long, after which others, on how many processes, and what each teaches.

Layer 6 (labs). Invariant: this is the one place that says it; the links in the notebooks, the page of contents, the
page of progress, the book and the instructor's table are made from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dlojz.labs.verdict import Said
from dlojz.schema import LabError, one_of
from dlojz.text import Language

_BEGINNING = Said("before the course", "avant le cours")
_VISION = Said("Vision Transformers", "Les Vision Transformers")
_PARALLELISM = Said("Model parallelism for very large models", "Les parallélismes de modèle pour les très gros modèles")
_INFERENCE = Said("Inference and fine-tuning", "Inférence et fine-tuning")
_LIBRARIES = Said("Interfaces of model parallelism", "API parallélismes de modèle")


@dataclass(frozen=True, kw_only=True)
class LabEntry:
    """One lab of the set.

    Args:
        number: Two digits, e.g. `01`.
        file: Stem of its source and of its notebooks, in every language.
        title: As the lab itself gives it.
        minutes: What a student needs, as the lab's introduction says: an estimate.
        after: Numbers of the labs whose results it builds on.
        processes: The most ranks that one of its cells or checks runs on; a notebook has more processes than these,
            see `dlojz.labs.durations.Room`.
        teaches: What it is about, in one line.
        chapter: Of the course that the lab goes with.
        campaigns: Campaigns of measurements that show the same at full size on a cluster, see `dlojz bench`.
    """

    number: str
    file: str
    title: Said
    minutes: int
    after: tuple[str, ...]
    processes: int
    teaches: Said
    chapter: Said = _PARALLELISM
    campaigns: tuple[str, ...] = ()

    @property
    def notebook(self) -> str:
        """File name of its notebooks, in every language."""
        return f"{self.file}.ipynb"

    def heading(self, language: Language) -> str:
        """Number and title, e.g. `04 ZeRO: sharding the states`."""
        return f"{self.number} {self.title[language == 'fr']}"


LABS = (
    LabEntry(
        number="00",
        file="00_getting_started",
        title=Said("Getting started", "Prise en main"),
        minutes=60,
        after=(),
        processes=2,
        teaches=Said(
            "a first real training on two processes, its folder, its record, and a prediction beside it",
            "un premier entraînement réel sur deux processus, son dossier, ses mesures, et une prédiction à côté",
        ),
        chapter=_BEGINNING,
    ),
    LabEntry(
        number="01",
        file="01_big_models",
        title=Said("Big models", "Gros modèles"),
        minutes=75,
        after=("00",),
        processes=2,
        teaches=Said(
            "attention by hand, from an image to tokens, and what parameters and operations cost",
            "l’attention à la main, de l’image aux tokens, et ce que coûtent paramètres et opérations",
        ),
        chapter=_VISION,
    ),
    LabEntry(
        number="02",
        file="02_memory_footprint",
        title=Said("Memory footprint", "Empreinte mémoire"),
        minutes=60,
        after=("01",),
        processes=1,
        teaches=Said(
            "what fills the memory of a training, and how to know it before it runs",
            "ce qui remplit la mémoire d’un entraînement, et comment le savoir avant de le lancer",
        ),
    ),
    LabEntry(
        number="03",
        file="03_data_parallelism",
        title=Said("Data parallelism", "Data Parallelism"),
        minutes=90,
        after=("00",),
        processes=4,
        teaches=Said(
            "a ring all-reduce and DDP by hand, what they cost and what hides behind the computation",
            "un all-reduce en anneau et DDP à la main, ce qu’ils coûtent et ce que le calcul en cache",
        ),
        campaigns=("data_parallelism",),
    ),
    LabEntry(
        number="04",
        file="04_zero",
        title=Said("ZeRO: sharding the states", "ZeRO : répartir les états"),
        minutes=90,
        after=("02", "03"),
        processes=4,
        teaches=Said(
            "optimizer states, gradients and weights shared out by hand, beside DeepSpeed and FSDP2",
            "états de l’optimiseur, gradients et poids répartis à la main, à côté de DeepSpeed et de FSDP2",
        ),
        campaigns=("zero_stages",),
    ),
    LabEntry(
        number="05",
        file="05_pipeline",
        title=Said("Pipeline parallelism", "Le parallélisme de pipeline"),
        minutes=120,
        after=("02", "03"),
        processes=4,
        teaches=Said(
            "schedules written, simulated, proven and run: bubble, memory, deadlocks, balanced stages",
            "des ordonnancements écrits, simulés, prouvés, exécutés : bulle, mémoire, interblocages, étages équilibrés",
        ),
        campaigns=("pipeline_chunks",),
    ),
    LabEntry(
        number="06",
        file="06_tensor_parallelism",
        title=Said("Tensor parallelism", "Le parallélisme de tenseur"),
        minutes=90,
        after=("01", "03"),
        processes=3,
        teaches=Said(
            "a layer cut by columns and by rows, a whole Transformer block with two all-reduces",
            "une couche coupée par colonne et par ligne, un bloc de Transformer entier avec deux all-reduces",
        ),
        campaigns=("tensor_degrees",),
    ),
    LabEntry(
        number="07",
        file="07_hybrid_3d",
        title=Said("Hybrid and 3D", "Hybride et 3D"),
        minutes=90,
        after=("03", "05", "06"),
        processes=8,
        teaches=Said(
            "the grid of ranks, its groups, their place on the nodes, and 3D really run on 8 processes",
            "la grille des rangs, ses groupes, leur place sur les nœuds, et du 3D vraiment exécuté sur 8 processus",
        ),
    ),
    LabEntry(
        number="08",
        file="08_best_compromise",
        title=Said("The best compromise", "Le meilleur compromis"),
        minutes=90,
        after=("04", "05", "06", "07"),
        processes=2,
        teaches=Said(
            "what sets tens of thousands of layouts apart, and a choice defended against measurements",
            "ce qui départage des dizaines de milliers de configurations, et un choix défendu face à la mesure",
        ),
        campaigns=("compromise",),
    ),
    LabEntry(
        number="09",
        file="09_distributed_optimizers",
        title=Said("Distributed optimizers", "Optimiseurs distribués"),
        minutes=90,
        after=("03",),
        processes=4,
        teaches=Said(
            "one bit per number with its error fed back, fused updates, and steps that send nothing",
            "un bit par nombre et son erreur compensée, des mises à jour fusionnées, des pas qui n’envoient rien",
        ),
    ),
    LabEntry(
        number="10",
        file="10_moe_and_curriculum",
        title=Said("Mixture of experts and curriculum", "Mélange d’experts et curriculum"),
        minutes=90,
        after=("03", "06"),
        processes=4,
        teaches=Said(
            "a gate, its balance, experts exchanged by all-to-all; sequences that grow during the training",
            "une porte et son équilibre, des experts échangés par all-to-all ; des séquences qui s’allongent en route",
        ),
    ),
    LabEntry(
        number="11",
        file="11_inference_and_fine_tuning",
        title=Said("Inference and fine-tuning", "Inférence et fine-tuning"),
        minutes=120,
        after=("01",),
        processes=1,
        teaches=Said(
            "from the big model to the small one: distillation, quantization, pruning, and what each really gains",
            "du gros modèle au petit : distillation, quantification, élagage, et ce que chacun fait vraiment gagner",
        ),
        chapter=_INFERENCE,
    ),
    LabEntry(
        number="12",
        file="12_libraries",
        title=Said("The libraries", "Les bibliothèques"),
        minutes=75,
        after=("03", "04", "05", "06"),
        processes=4,
        teaches=Said(
            "one training written for torch, DeepSpeed, Accelerate, Megatron and Colossal-AI: what each hides",
            "un entraînement écrit pour torch, DeepSpeed, Accelerate, Megatron et Colossal-AI : ce que chacune cache",
        ),
        chapter=_LIBRARIES,
    ),
)
BY_NUMBER = {entry.number: entry for entry in LABS}


def entry_of(number: str) -> LabEntry:
    """The lab of a number.

    Raises:
        LabError: if there is none; the sentence lists those that exist.
    """
    if number not in BY_NUMBER:
        raise LabError(one_of("lab", number, BY_NUMBER))
    return BY_NUMBER[number]


def neighbours(number: str) -> tuple[LabEntry | None, LabEntry | None]:
    """The labs before and after one; None at the ends."""
    place = LABS.index(entry_of(number))
    return (LABS[place - 1] if place else None), (LABS[place + 1] if place + 1 < len(LABS) else None)


def duration(minutes: int) -> str:
    """Minutes as one says them: `45 min`, `1 h`, `1 h 30`."""
    hours, rest = divmod(minutes, 60)
    if not hours:
        return f"{rest}\u00a0min"
    return f"{hours}\u00a0h" + (f"\u00a0{rest:02d}" if rest else "")


def total_minutes(numbers: Iterable[str] | None = None) -> int:
    """What some labs take, or the whole set.

    Raises:
        LabError: if there is no lab of a number.
    """
    return sum(entry.minutes for entry in (LABS if numbers is None else map(entry_of, numbers)))


@dataclass(frozen=True)
class Programme:
    """A choice of labs for some days.

    Args:
        days: How long, as a heading says it.
        numbers: Its labs.
        without: Those that its labs build on and that it leaves out, for who knows what they teach.
    """

    days: Said
    numbers: tuple[str, ...]
    without: tuple[str, ...] = ()

    @property
    def minutes(self) -> int:
        """What its labs take."""
        return total_minutes(self.numbers)


def _up_to(number: str, but: tuple[str, ...] = ()) -> tuple[str, ...]:
    return tuple(entry.number for entry in LABS if entry.number <= number and entry.number not in but)


PROGRAMMES = (
    Programme(Said("half a day", "une demi-journée"), ("00", "02", "03"), without=("01",)),
    Programme(Said("two days", "deux jours"), _up_to("08", but=("01",)), without=("01",)),
    Programme(Said("four days", "quatre jours"), _up_to("12")),
)
"""From short to long; a day has about six hours of lab. Who does not know attention begins with lab 01."""
