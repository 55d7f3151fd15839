"""Figures and tables of lab 11 on distillation and quantization, and the board of all methods.

Yes-or-no answers use a stated threshold, so that a processor whose last digits differ answers the same. Students of one
seed begin with the same weights, make as many updates and read their images in the same order; only the loss differs.

Shape suffixes: N images, K classes, O outputs, I inputs.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dlojz.base.language import format_bytes, percent, say, significant
from dlojz.base.table import Table, titles
from dlojz.display.canvas import LabFigure, finish, new_figure, plain
from dlojz.display.style import BLUE, ORANGE, PREDICTED_ALPHA, SKY
from dlojz.labs.kit.exercise import Said, or_to_do
from dlojz.labs.kit.figures import answered, labelled, panel, pictured
from dlojz.labs.lab11_compression.exercises_distill import UNKNOWN
from dlojz.labs.lab11_compression.exercises_quantize import quantize_affine, quantize_rows

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dlojz.compress.board_record import Board
    from dlojz.compress.quantizers import RangeChoice, Scheme
    from dlojz.compress.task import Task


def teacher_seen(teacher: nn.Module, task: Task) -> Table:
    """Answer whether the teacher is accurate enough to learn from."""
    from dlojz.compress.task import accuracy

    question = say(en="the teacher's accuracy is above 95%", fr="l’exactitude du professeur dépasse 95 %")
    return answered([(question, accuracy(teacher, task) > 0.95)])


def board_table(board: Board) -> Table:
    """Tabulate the methods: accuracy, bytes predicted and written, latency over the teacher's, Pareto front."""
    front = {line.method for line in board.front()}
    rows = tuple(
        (
            line.method,
            percent(line.accuracy),
            f"{format_bytes(line.predicted_bytes)} | {format_bytes(line.file_bytes)}",
            f"÷ {significant(line.ratio)}",
            f"× {significant(line.latency_ratio)}",
            "●" if line.method in front else "",
        )
        for line in board.lines()
    )
    head = titles(
        en="method; accuracy; bytes: predicted | file; size; latency; Pareto front",
        fr="méthode; exactitude; octets : prédits | fichier; taille; latence; front de Pareto",
    )
    return Table(head, rows)


def files_as_predicted(board: Board) -> Table:
    """Answer whether the bytes of every method's numbers are those predicted."""
    same: Sequence[bool] = [line.payload_bytes == line.predicted_bytes for line in board.lines()]
    return answered([(say(en="bytes as predicted, for every method", fr="octets comme prédits, pour chaque méthode"),
                      all(same))])  # fmt: skip


MixedLoss = Callable[["Tensor", "Tensor", "Tensor", float, float], "Tensor"]
STUDENT, DISTILL_EPOCHS, LABELS, TEMPERATURE, ALPHA = "vit_mini", 5, 60, 4.0, 0.9
DISTILBERT_SHARE, DISTILBERT_KEPT = 0.60, 0.97
"""Share of BERT's parameters, and of its score on GLUE: Sanh et al. 2019 (arXiv 1910.01108), abstract: "reduce the size
of a BERT model by 40%, while retaining 97% of its language understanding capabilities"."""


@pictured
def softened(teacher: nn.Module, task: Task, temperatures: Sequence[float]) -> LabFigure:
    """Draw a held-out image on which the teacher hesitates, and its probabilities at several temperatures."""
    from dlojz.compress.task import logits

    answers_NK = logits(teacher, task.held_out_NCHW)
    second_N = answers_NK.softmax(1).topk(2).values[:, 1]
    right_N = answers_NK.argmax(1) == task.held_out_labels_N
    chosen = int((second_N * right_N).argmax())
    label = int(task.held_out_labels_N[chosen])
    told = ", ".join(f"T = {significant(one, 4)}" for one in temperatures)
    figure = new_figure(
        2.0 + 2.6 * len(temperatures), 2.6,
        alt=say(
            en=f"A handwritten {label}, and the teacher's probabilities for it at {told}: the higher T, the flatter. "
            "The dark bar is the true class.",
            fr=f"Un {label} manuscrit, et les probabilités du professeur à {told} : plus T est haut, plus elles "
            "s’aplatissent. La barre foncée est la vraie classe.",
        ),
    )  # fmt: skip
    first, *others = figure.subplots(1, 1 + len(temperatures), width_ratios=[0.7, *[1] * len(temperatures)])
    first.imshow(task.held_out_NCHW[chosen].mean(0).tolist(), cmap="gray_r")
    first.set_axis_off()
    first.set_title(say(en=f"a {label}", fr=f"un {label}"))
    for axes, temperature in zip(others, temperatures, strict=True):
        shares_K = (answers_NK[chosen] / temperature).softmax(0)
        places = range(len(shares_K))
        axes.bar(places, (100 * shares_K).tolist(), color=[BLUE if place == label else SKY for place in places])
        axes.set_title(f"T = {significant(temperature, 4)}")
        axes.set_ylim(0, 100)
        axes.set_xticks(list(places))
        axes.set_xlabel(say(en="class (dark: the true one)", fr="classe (foncé : la vraie)"))
        plain(axes)
    others[0].set_ylabel(say(en="probability (%)", fr="probabilité (%)"))
    return finish(figure)


_ARMS = {
    "labels": Said("student alone, all labels", "étudiant seul, toutes les étiquettes"),
    "both": Said("student and teacher, all labels", "étudiant et professeur, toutes les étiquettes"),
    "few": Said("student alone, {labels} labels", "étudiant seul, {labels} étiquettes"),
    "taught": Said("student and teacher, {labels} labels", "étudiant et professeur, {labels} étiquettes"),
    "unlabelled": Said("student and teacher, no label", "étudiant et professeur, aucune étiquette"),
}


@dataclass(frozen=True, kw_only=True)
class Students:
    """Accuracy of students, by the data they were given.

    Args:
        share: their parameters over the teacher's.
        labels: true labels that the poorer ones were given.
        kept: by arm and seed, accuracy over that of the teacher.
    """

    share: float
    labels: int
    kept: dict[str, tuple[float, ...]]

    def median(self, arm: str) -> float:
        """Share of the teacher's accuracy that an arm keeps, median over the seeds."""
        return statistics.median(self.kept[arm])

    @property
    def sheet(self) -> Table:
        """Table with one row per arm, DistilBERT below."""
        rows = [
            (
                str(_ARMS[arm]).format(labels=self.labels),
                percent(self.share),
                percent(self.median(arm)),
                " – ".join(percent(one) for one in (min(found), max(found))),
            )
            for arm, found in self.kept.items()
        ]
        published = percent(DISTILBERT_SHARE), percent(DISTILBERT_KEPT), "–"
        rows.append((say(en="DistilBERT (published)", fr="DistilBERT (publié)"), *published))
        head = titles(
            en="what is learnt from; parameters; accuracy kept, median; lowest – highest",
            fr="données d’apprentissage; paramètres; exactitude gardée, médiane; min – max",
        )
        return Table(head, tuple(rows))

    def __repr__(self) -> str:
        return str(self.sheet)

    def _repr_html_(self) -> str:
        return self.sheet._repr_html_()


@or_to_do
def students(
    teacher: nn.Module, task: Task, mixed_loss: MixedLoss, *, seeds: Sequence[int] = (0, 1), labels: int = LABELS
) -> Students:
    """Train students alone and with the student's mixed loss.

    Args:
        mixed_loss: of logits, the teacher's logits, labels (-1: unknown), temperature and alpha.
        seeds: of the students' weights and of the order of the images.
        labels: true labels of the arms that have few.
    """
    import torch

    from dlojz.compress.task import Settings, accuracy, cross_entropy, fit, new_model

    def taught(alpha: float) -> Callable[[nn.Module, Tensor, Tensor], Tensor]:
        def loss(model: nn.Module, images: Tensor, known: Tensor) -> Tensor:
            with torch.no_grad():
                answers = teacher(images)
            return mixed_loss(model(images), answers, known, TEMPERATURE, alpha)

        return loss

    pair = torch.zeros(2, 3)
    mixed_loss(pair, pair, torch.tensor([0, -1]), TEMPERATURE, ALPHA)  # still to do? then nothing is trained
    partly, few = task.partly_labelled(labels), task.few(labels)
    updates = Settings(epochs=DISTILL_EPOCHS).steps(task)
    arms = {
        "labels": (task, cross_entropy, DISTILL_EPOCHS),
        "both": (task, taught(ALPHA), DISTILL_EPOCHS),
        "few": (few, cross_entropy, round(updates / few.batches_per_epoch(64))),
        "taught": (partly, taught(ALPHA), DISTILL_EPOCHS),
        "unlabelled": (replace(task, labels_N=torch.full_like(task.labels_N, UNKNOWN)), taught(1.0), DISTILL_EPOCHS),
    }
    base, share = accuracy(teacher, task), 0.0
    kept: dict[str, tuple[float, ...]] = {}
    for arm, (own, loss, epochs) in arms.items():
        found = []
        for seed in seeds:
            model = new_model(STUDENT, task, seed)
            share = _count(model) / _count(teacher)
            fit(model, own, Settings(epochs=epochs, seed=seed), loss=loss)
            found.append(accuracy(model, task) / base)
        kept[arm] = tuple(found)
    return Students(share=share, labels=labels, kept=kept)


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@or_to_do
def helps(trained: Students) -> Table:
    """Answer whether the teacher helps with few labels, with all of them, and beyond DistilBERT's mark."""
    questions = (
        (
            say(
                en=f"with {trained.labels} labels, the teacher brings more than 5 points",
                fr=f"avec {trained.labels} étiquettes, le professeur apporte plus de 5 points",
            ),
            trained.median("taught") > trained.median("few") + 0.05,
        ),
        (
            say(
                en="with all labels, the teacher brings more than 5 points",
                fr="avec toutes les étiquettes, le professeur apporte plus de 5 points",
            ),
            trained.median("both") > trained.median("labels") + 0.05,
        ),
        (
            say(en="97% kept by 60% of the parameters or less", fr="97 % gardés par 60 % des paramètres au plus"),
            trained.share <= DISTILBERT_SHARE and trained.median("taught") >= DISTILBERT_KEPT,
        ),
    )
    return answered(questions)


Rows = Callable[["Tensor", int], tuple["Tensor", "Tensor"]]
Affine = Callable[["Tensor", float, float, int], tuple["Tensor", float, int]]
FakeQuantize = Callable[["Tensor", "Tensor", int], "Tensor"]
BITS, SAMPLE = (8, 7, 6, 5, 4, 3, 2), 200_000
FEW_BITS, QUANTIZE_EPOCHS, LEARNING_RATE = 2, 2, 5e-4


def noise_ratio(weight_OI: Tensor, bits: int, fewer: int) -> float:
    """Measure by how much the mean square error grows from some bits to fewer."""
    errors = []
    for one in (fewer, bits):
        q_OI, scale_O1 = quantize_rows(weight_OI.detach(), one)
        errors.append(float((scale_O1 * q_OI - weight_OI.detach()).double().square().mean()))
    return errors[0] / errors[1]


def _snr_db(rows: Rows, weight_OI: Tensor, bits: int) -> tuple[float, float]:
    """Signal to noise in decibels, predicted by scale² / 12 and measured."""
    from dlojz.compress.quantized_model import decibels

    q_OI, scale_O1 = rows(weight_OI, bits)
    power = float(weight_OI.double().square().mean())
    noise = float((scale_O1 * q_OI - weight_OI).double().square().mean())
    return decibels(power, float(scale_O1.double().square().mean()) / 12), decibels(power, noise)


@pictured
def noise(rows: Rows, weight_OI: Tensor, bits: Sequence[int] = BITS) -> LabFigure:
    """Draw signal to noise by bits, one scale per row and one for the whole matrix, predicted and measured."""
    weight_OI = weight_OI.detach()
    whole = weight_OI.reshape(1, -1)
    found = {
        say(en="one scale per output", fr="une échelle par sortie"): [_snr_db(rows, weight_OI, one) for one in bits],
        say(en="one scale in all", fr="une seule échelle"): [_snr_db(rows, whole, one) for one in bits],
    }
    told = " ; ".join(
        say(en=f"{name}: ", fr=f"{name} : ")
        + ", ".join(f"{one} bits {significant(pair[1])} dB" for one, pair in zip(bits, pairs, strict=True))
        for name, pairs in found.items()
    )
    axes = panel(8.0, 3.8, f"Signal to noise by bits. {told}.", f"Rapport signal sur bruit selon les bits. {told}.")
    for (name, pairs), color, marker in zip(found.items(), (BLUE, ORANGE), ("o", "s"), strict=True):
        predicted, measured = zip(*pairs, strict=True)
        label = say(en=f"{name}, predicted (Δ²/12)", fr=f"{name}, prédit (Δ²/12)")
        axes.plot(bits, predicted, color=color, linewidth=5, alpha=PREDICTED_ALPHA, label=label)
        label = say(en=f"{name}, measured", fr=f"{name}, mesuré")
        axes.plot(bits, measured, color=color, linestyle="", marker=marker, label=label)
    x, y = say(en="bits per weight", fr="bits par poids"), say(en="signal to noise (dB)", fr="signal sur bruit (dB)")
    return labelled(axes, x, y, fontsize=9)


def _ends(seen: Tensor, scheme: Scheme, choice: RangeChoice) -> tuple[float, float]:
    from dlojz.compress.quantizers import value_range

    low, high = (float(end) for end in value_range(seen.reshape(1, -1), scheme, choice))
    return min(low, 0.0), max(high, 0.0)


def _least_error(seen: Tensor, bits: int) -> tuple[float, float]:
    """The range of least square error, each end tried on its own: on a sample, which changes a range little."""
    some = seen.flatten()[:: max(seen.numel() // SAMPLE, 1)]
    low, high = min(float(some.min()), 0.0), max(float(seen.max()), 0.0)

    def error(range_: tuple[float, float]) -> float:
        q, scale, zero_point = quantize_affine(some, *range_, bits)
        return float((scale * (q.float() - zero_point) - some).square().mean())

    tried = [(low * part / 4, high * share / 40) for part in range(5) for share in range(8, 41)]
    return min(tried, key=error)


def observed(seen: Tensor, images: int) -> Table:
    """Tabulate what was seen of a layer's inputs: how many there are, and on which sides of zero.

    Args:
        seen: (rows, inputs), the rows being the positions of all images.
        images: how many were run through.
    """
    rows, inputs = seen.shape
    head = titles(
        en="images × positions; values per position; below zero; above zero",
        fr="images × positions; valeurs par position; négatives; positives",
    )
    some = [say(en="yes", fr="oui") if bool(side.any()) else say(en="no", fr="non") for side in (seen < 0, seen > 0)]
    return Table(head, ((f"{images} × {rows // images}", str(inputs), *some),))


@or_to_do
def calibrated(affine: Affine, seen: Tensor, bits: int) -> Table:
    """Compare three ways to choose a range for the same activations, by the student's function."""
    from dlojz.compress.quantized_model import sqnr_db
    from dlojz.compress.quantizers import RANGES, Scheme

    names = {
        "min_max": say(en="minimum and maximum", fr="minimum et maximum"),
        "percentile": say(en="percentiles (0.1% left outside)", fr="centiles (0,1 % laissé dehors)"),
        "mse": say(en="least square error", fr="moindre erreur quadratique"),
    }
    scheme = Scheme(bits=bits, symmetric=False, per_channel=False)
    table = []
    for choice in RANGES:
        low, high = _least_error(seen, bits) if choice == "mse" else _ends(seen, scheme, choice)
        q, scale, zero_point = affine(seen, low, high, bits)
        outside = float(((seen < low) | (seen > high)).double().mean())
        back = scale * (q.float() - zero_point)
        table.append(
            (
                names[choice],
                f"[{significant(low)} ; {significant(high)}]",
                percent(outside, 2),
                significant(scale),
                f"{significant(sqnr_db(seen, back))} dB",
            )
        )
    head = titles(
        en=f"calibration, {bits} bits; range; clamped; scale; signal to noise",
        fr=f"calibrage, {bits} bits; intervalle; borné; échelle; signal sur bruit",
    )
    return Table(head, tuple(table))


@contextmanager
def _quantized(model: nn.Module, replaced: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """A model whose linear layers compute with other weights, for a while; gradients reach their own."""
    from torch import nn
    from torch.nn.utils import parametrize

    class Replaced(nn.Module):
        def forward(self, weight_OI: Tensor) -> Tensor:
            return replaced(weight_OI)

    layers = [one for one in model.modules() if isinstance(one, nn.Linear)]
    for layer in layers:
        parametrize.register_parametrization(layer, "weight", Replaced())
    try:
        yield
    finally:
        for layer in layers:
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)


def _rounded(rows: Rows, bits: int) -> Callable[[Tensor], Tensor]:
    def replaced(weight_OI: Tensor) -> Tensor:
        q_OI, scale_O1 = rows(weight_OI, bits)
        return scale_O1 * q_OI

    return replaced


@or_to_do
def post_training(rows: Rows, teacher: nn.Module, task: Task, bits: Sequence[int] = (8, 4, 3, 2)) -> Accuracies:
    """Measure accuracy with all linear weights in few bits, without training, by the student's function."""
    from dlojz.compress.task import accuracy

    found = {32: accuracy(teacher, task)}
    for one in bits:
        model = copy.deepcopy(teacher)
        with _quantized(model, _rounded(rows, one)):
            found[one] = accuracy(model, task)
    return Accuracies(found)


@or_to_do
def aware_training(
    rows: Rows, fake_quantize: FakeQuantize, teacher: nn.Module, task: Task, *, bits: int = FEW_BITS
) -> tuple[float, float, float]:
    """Measure accuracy of the teacher, of its weights in few bits, and after two epochs that see the rounding.

    Every weight is trained as it is; what is computed with is what the student's `fake_quantize` makes of it, on a
    scale that follows the largest weight of each row.
    """
    import torch

    from dlojz.compress.task import Settings, accuracy, fit

    high = 2 ** (bits - 1) - 1

    def replaced(weight_OI: Tensor) -> Tensor:
        return fake_quantize(weight_OI, weight_OI.detach().abs().amax(1, keepdim=True) / high, bits)

    fake_quantize(torch.ones(1, 2), torch.ones(1, 1), bits)  # still to do? then nothing is trained
    model = copy.deepcopy(teacher)
    with _quantized(model, _rounded(rows, bits)):
        before = accuracy(model, task)
    with _quantized(model, replaced):
        fit(model, task, Settings(epochs=QUANTIZE_EPOCHS, learning_rate=LEARNING_RATE))
    with _quantized(model, _rounded(rows, bits)):
        after = accuracy(model, task)
    return accuracy(teacher, task), before, after


class Accuracies(dict[int, float]):
    """Accuracy by bits, shown as a table."""

    def sheet(self) -> Table:
        """Table with one column per number of bits."""
        head = (say(en="bits per weight", fr="bits par poids"), *map(str, self))
        return Table(head, ((say(en="accuracy", fr="exactitude"), *map(percent, self.values())),))

    def __repr__(self) -> str:
        return str(self.sheet())

    def _repr_html_(self) -> str:
        return self.sheet()._repr_html_()


@or_to_do
def post_training_seen(found: Accuracies) -> Table:
    """Answer how much is lost in 8, 4 and 2 bits."""
    questions = [
        (say(en=f"in {bits} bits, less than 2 points are lost", fr=f"en {bits} bits, on perd moins de 2 points"),
         found[32] - found[bits] < 0.02)
        for bits in (8, 4, 2)
    ]  # fmt: skip
    return answered(questions)


@or_to_do
def aware_training_table(found: tuple[float, float, float]) -> Table:
    """Tabulate the three accuracies of a training that sees the rounding."""
    head = titles(
        en=f"32 bits; {FEW_BITS} bits, no training; {FEW_BITS} bits, trained",
        fr=f"32 bits; {FEW_BITS} bits, sans entraînement; {FEW_BITS} bits, entraîné",
    )
    return Table(head, (tuple(percent(one) for one in found),))


@or_to_do
def aware_training_seen(found: tuple[float, float, float]) -> Table:
    """Answer whether two epochs bring back nine tenths of the teacher's accuracy."""
    teacher, before, after = found
    return answered(
        [
            (say(en="without training, nine tenths of the accuracy are kept",
                 fr="sans entraînement, on garde neuf dixièmes de l’exactitude"),
             before > 0.9 * teacher),
            (say(en="after training, nine tenths of the accuracy are kept",
                 fr="après entraînement, on garde neuf dixièmes de l’exactitude"),
             after > 0.9 * teacher),
        ]
    )  # fmt: skip
