"""Methods of compression: what a method takes (`Start`) and gives (`Shrunk`), and the catalogue of all of them.

A method does not change the teacher; an option that it does not have is refused. Importing this loads no torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from dlojz.base.errors import LabError
from dlojz.base.language import one_of, refusal, say
from dlojz.base.requirements import missing_library

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dlojz.compress.task import Progress, Task

Family = Literal["distillation", "quantization", "pruning"]
TORCHAO_VERSION = "0.18.0"

TIMED_IMAGES = 64
"""Images of an answer that is timed: from 16 on an image takes vit_tiny no longer than among more, so that arithmetic
is measured and not the calls; a latency of one image is mostly calls."""


@dataclass(frozen=True)
class Start:
    """Start of a method: a trained teacher and its task.

    Args:
        teacher: trained, in evaluation mode; it is not changed.
        teacher_name: in the catalogue of models.
        seed: of whatever is drawn.
        options: of the method, by name, over its defaults.
        timed_images: of an answer that will be timed, for which a method foresees how long it takes.
    """

    teacher: nn.Module
    teacher_name: str
    task: Task
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    progress: Progress | None = None
    timed_images: int = TIMED_IMAGES

    @property
    def timed_batch(self) -> Tensor:
        """The images of that answer."""
        return self.task.held_out_NCHW[: self.timed_images]


@dataclass(frozen=True)
class LayerError:
    """Signal to noise of one layer of a smaller model against the teacher's.

    Args:
        predicted_sqnr_db: signal to noise in decibels, foreseen before it was computed; None where nothing foresees
            it.
        measured_sqnr_db: the same, measured.
        bits: of a weight.
    """

    name: str
    predicted_sqnr_db: float | None
    measured_sqnr_db: float
    bits: float


@dataclass(frozen=True)
class Shrunk:
    """Smaller model that a method gives.

    Args:
        model: what answers, in evaluation mode.
        stored: the tensors that a file keeps of it.
        predicted_bytes: of these tensors, from shapes and settings alone, before anything was computed.
        parameters: weights that are left, zeros not counted.
        layer_errors: layer by layer, where the method keeps the teacher's layers.
        notes: what a reader must know of it, a sentence each.
        predicted_latency_ratio: seconds of an answer over the teacher's, foreseen before the model was timed; None
            where nothing foresees it.
    """

    model: nn.Module
    stored: Mapping[str, Tensor]
    predicted_bytes: int
    parameters: int
    layer_errors: tuple[LayerError, ...] = ()
    notes: tuple[str, ...] = ()
    predicted_latency_ratio: float | None = None


@dataclass(frozen=True)
class Method:
    """Method of compression.

    Args:
        name: on the command line and in the tables.
        family: what kind of way it is.
        function: `module:function` of `dlojz.compress`, from a `Start` to a `Shrunk`.
        summary: in one line, in the reader's language.
        options: its options with their defaults.
        needs: packages that it imports and that may be missing, with `==` and a version where only that one will do.
    """

    name: str
    family: Family
    function: str
    summary: Callable[[], str]
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()

    def missing(self) -> str | None:
        """Say which package is missing here and the command that installs it; None if all are there."""
        for need in self.needs:
            package = need.partition("==")[0]
            if importlib.util.find_spec(package) is None:
                return missing_library(need, en=f"the method {self.name}", fr=f"la méthode {self.name}")
        return None

    def check_options(self, names: Iterable[str]) -> None:
        """Refuse a name that is no option of this method.

        Raises:
            LabError: the sentence lists those that it has.
        """
        for name in names:
            if not self.options:
                raise refusal(
                    en=f"{self.name} has no options, but {name!r} was received: leave it out.",
                    fr=f"{self.name} n’a pas d’option, mais {name!r} a été reçu : retirez-la.",
                )
            if name not in self.options:
                raise LabError(
                    one_of(say(en=f"option of {self.name}", fr=f"option de {self.name}"), name, self.options)
                )

    def __call__(self, start: Start) -> Shrunk:
        """Apply it.

        Raises:
            LabError: if an option is unknown or illegal, or a package is missing.
        """
        if lacking := self.missing():
            raise LabError(lacking)
        self.check_options(start.options)
        module, _, function = self.function.partition(":")
        apply = getattr(importlib.import_module(f"dlojz.compress.{module}"), function)
        shrunk: Shrunk = apply(start, **{**self.options, **start.options})  # the caller's options over the defaults
        return shrunk


def _method(
    family: Family, name: str, function: str, en: str, fr: str, *, needs: tuple[str, ...] = (), **options: Any
) -> Method:
    return Method(name, family, f"{family}:{function}", lambda: say(en=en, fr=fr), options, needs)


_distillation = partial(_method, "distillation", student="vit_mini", initialise="random", epochs=12, learning_rate=1e-3)
DISTILLATION_METHODS = (
    _distillation(
        "student_alone",
        "student_alone",
        "the student trained on the labels, without its teacher: what the others are measured by",
        "l’étudiant entraîné sur les étiquettes, sans son professeur : la référence des autres",
    ),
    _distillation(
        "distill_soft",
        "soft",
        "the teacher's probabilities softened by a temperature (KL), and a tenth of the labels",
        "les probabilités du professeur adoucies par une température (KL), et un dixième d’étiquettes",
        temperature=4.0,
        labels=0.1,
    ),
    _distillation(
        "distill_logits",
        "logits",
        "the teacher's logits, by their mean square difference; no labels",
        "les logits du professeur, par l’écart quadratique moyen ; sans étiquettes",
        labels=0.0,
    ),
    _distillation(
        "distill_hidden",
        "hidden",
        "DistilBERT's recipe: every second block of the teacher, soft labels, labels, and the cosine of hidden states",
        "la recette de DistilBERT : un bloc du professeur sur deux, étiquettes douces et vraies, et cosinus des états "
        "cachés",
        initialise="teacher",
        temperature=4.0,
        labels=0.1,
        hidden=1.0,
        hidden_kind="cosine",
    ),
)
"""In the order in which the board shows them, as the other families."""

_pruning = partial(_method, "pruning")
_FINE_TUNING: dict[str, Any] = {"epochs": 3, "learning_rate": 5e-4}
PRUNING_METHODS = (
    _pruning(
        "magnitude_global",
        "magnitude",
        "the smallest weights of all layers together become zero, the others are trained on",
        "les plus petits poids, toutes couches confondues, deviennent nuls ; les autres sont affinés",
        sparsity=0.8,
        **_FINE_TUNING,
        per_layer=False,
    ),
    _pruning(
        "magnitude_layer",
        "magnitude",
        "the smallest weights of each layer become zero, the same share of each; the others are trained on",
        "les plus petits poids de chaque couche deviennent nuls, la même part partout ; les autres sont affinés",
        sparsity=0.8,
        **_FINE_TUNING,
        per_layer=True,
    ),
    _pruning(
        "gradual",
        "gradual",
        "more and more weights become zero while the model trains, along the cubic of Zhu and Gupta",
        "de plus en plus de poids deviennent nuls pendant l’entraînement, selon la cubique de Zhu et Gupta",
        sparsity=0.9,
        epochs=6,
        learning_rate=1e-3,
        every=5,
        per_layer=True,
    ),
    _pruning(
        "lottery",
        "lottery_ticket",
        "a winning ticket: trained, pruned and rewound in rounds, from scratch",
        "un ticket gagnant : entraîné, élagué puis rembobiné, plusieurs fois, à partir de zéro",
        sparsity=0.8,
        rounds=2,
        epochs=6,
        learning_rate=1e-3,
        rewind_epochs=1,
        per_layer=True,
    ),
    _pruning(
        "two_to_four",
        "two_to_four",
        "2:4: of every four weights of a row the two smaller become zero, the others are trained on",
        "2:4 : sur quatre poids d’une ligne, les deux plus petits deviennent nuls ; les autres sont affinés",
        **_FINE_TUNING,
    ),
    _pruning(
        "two_to_four_permuted",
        "two_to_four_permuted",
        "2:4 after an order of the dimensions that computes the same and loses less",
        "2:4 après avoir rangé les dimensions dans un ordre qui calcule la même chose et perd moins",
        **_FINE_TUNING,
        sweeps=2,
    ),
    _pruning(
        "two_to_four_sr_ste",
        "two_to_four_sr_ste",
        "2:4 trained with SR-STE: the mask follows the weights, hidden ones are pulled towards zero",
        "2:4 appris avec SR-STE : le masque suit les poids, ceux qu’il cache sont tirés vers zéro",
        **_FINE_TUNING,
        decay=2e-4,
        origin="teacher",
    ),
)

_quantization = partial(_method, "quantization")
_INT8: dict[str, Any] = {"bits": 8, "symmetric": True, "per_channel": True, "weight_range": "min_max"}
# Where it begins to matter for a model this small: two bits, and one scale for a whole layer.
_FEW_BITS: dict[str, Any] = {"bits": 2, "per_channel": False, "weight_range": "min_max"}
_TORCHAO = {
    "int8_weight_only": ("torchao's INT8 weights: our numbers", "les poids INT8 de torchao : nos nombres"),
    "int8_dynamic": (
        "torchao's INT8 weights and inputs: our numbers; made for torch.compile: called as here, slower than torch's "
        "kernels",
        "poids et entrées INT8 de torchao : nos nombres ; conçu pour torch.compile : appelé comme ici, plus lent que "
        "les noyaux de torch",
    ),
    "fp8_weight_only": ("torchao's FP8 weights (e4m3)", "les poids FP8 (e4m3) de torchao"),
    "int4_weight_only": (
        "torchao's INT4 weights in groups of 32, the rest in bfloat16",
        "les poids INT4 de torchao par groupes de 32, le reste en bfloat16",
    ),
}
QUANTIZATION_METHODS = (
    _quantization(
        "int8_weight_only",
        "post_training",
        "INT8 weights, multiplied as real numbers",
        "poids INT8, multipliés comme des réels",
        **_INT8,
        activations="float",
    ),
    _quantization(
        "int8_dynamic",
        "post_training",
        "INT8 weights and inputs, each row of inputs on a grid found as it comes; products of integers",
        "poids et entrées INT8, chaque ligne d’entrées sur une grille trouvée à la volée ; produits d’entiers",
        **_INT8,
        activations="dynamic",
    ),
    _quantization(
        "int8_static",
        "post_training",
        "INT8 weights and inputs, the inputs' grid fixed beforehand by calibration; products of integers",
        "poids et entrées INT8, la grille des entrées fixée d’avance par calibrage ; produits d’entiers",
        **_INT8,
        activations="static",
        activation_range="mse",
        samples=256,
    ),
    _quantization(
        "int4_weight_only",
        "post_training",
        "4-bit weights, two to a byte, a scale per output; multiplied as real numbers",
        "poids de 4 bits, deux par octet, une échelle par sortie ; multipliés comme des réels",
        **{**_INT8, "bits": 4},
        activations="float",
    ),
    _quantization(
        "ptq_2bit",
        "post_training",
        "2-bit weights, one scale a layer, without any training: where quantization alone breaks",
        "poids de 2 bits, une échelle par couche, sans entraînement : là où la quantification seule casse",
        **_FEW_BITS,
        symmetric=True,
        activations="float",
    ),
    _quantization(
        "ptq_2bit_tuned",
        "post_training_tuned",
        "the same, then scales, biases and norms are trained on; the integers stay",
        "la même, puis échelles, biais et normalisations sont affinés ; les entiers restent",
        **_FEW_BITS,
        **_FINE_TUNING,
    ),
    _quantization(
        "qat_2bit",
        "aware_training",
        "the same grid, with the weights trained on it through the straight-through estimator",
        "la même grille, les poids s’y entraînant grâce à l’estimateur straight-through",
        **_FEW_BITS,
        **_FINE_TUNING,
    ),
    _quantization(
        "torch_int8_dynamic",
        "torch_dynamic",
        "INT8 with torch's own kernels, the fast way on a CPU",
        "INT8 avec les noyaux de torch, la voie rapide sur CPU",
    ),
    *(
        _quantization(f"torchao_{form}", f"torchao_{form}", *summary, needs=(f"torchao=={TORCHAO_VERSION}",))
        for form, summary in _TORCHAO.items()
    ),
)

METHODS: dict[str, Method] = {
    method.name: method for method in (*DISTILLATION_METHODS, *QUANTIZATION_METHODS, *PRUNING_METHODS)
}


def method(name: str) -> Method:
    """Look up a method by its name.

    Raises:
        LabError: if there is none; the sentence lists those that exist.
    """
    if name not in METHODS:
        raise LabError(one_of(say(en="method", fr="méthode"), name, METHODS))
    return METHODS[name]
