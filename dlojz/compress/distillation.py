"""Distillation: losses on logits, hidden states and labels, and the training of a student.

Each loss is 0 where the student answers as the teacher does (the labels' apart). The teacher runs without gradients and
is not changed; only the student, and what projects its hidden states, is updated.

Shape suffixes: B batch, T tokens, D width, K classes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlojz.base.errors import LabError
from dlojz.base.language import integer, one_of, refusal, say, shortest
from dlojz.compress.task import (
    UNKNOWN,
    Loss,
    Progress,
    Settings,
    Task,
    fit,
    new_model,
    parameters,
)
from dlojz.models.blocks import BlockList

HiddenKind = Literal["cosine", "mse"]
LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.01, 1000.0
"""Below, the softmax is an argmax; above, fp32 keeps nothing of what the probabilities differ by."""
_WEIGHTS = ("soft", "logits", "hidden", "labels")


def check_temperature(temperature: float) -> None:
    """Refuse a temperature at which nothing can be learnt.

    Raises:
        LabError: outside of 0.01 to 1000; 0, negative numbers and NaN among them.
    """
    if not LEAST_TEMPERATURE <= temperature <= MOST_TEMPERATURE:
        raise refusal(
            en=f"temperature must be greater than 0 (from {shortest(LEAST_TEMPERATURE)} to "
            f"{shortest(MOST_TEMPERATURE)}), but {temperature!r} was received: 1 leaves the probabilities as they "
            "are, 2 to 10 soften them.",
            fr="temperature doit être strictement positive "
            f"(de {shortest(LEAST_TEMPERATURE)} à {shortest(MOST_TEMPERATURE)}), mais {temperature!r} a été reçu : "
            "1 laisse les probabilités telles quelles, 2 à 10 les adoucissent.",
        )


def soft_loss(student_BK: Tensor, teacher_BK: Tensor, temperature: float) -> Tensor:
    """Compute T² times the Kullback-Leibler divergence of the softened probabilities, in nats.

    Args:
        teacher_BK: logits of the teacher; no gradient reaches them.
        temperature: T, by which both are divided.

    Raises:
        LabError: for a temperature that is not positive.

    Source: Hinton et al. 2015 (arXiv 1503.02531), section 2: gradients of softened probabilities scale as 1/T², hence
    the factor. The divergence is their cross-entropy less the entropy of the teacher, whose gradient is nothing.
    """
    check_temperature(temperature)
    # (B, K) each, as logarithms: a probability that underflows keeps its logarithm.
    student = F.log_softmax(student_BK / temperature, dim=1)
    teacher = F.log_softmax(teacher_BK.detach() / temperature, dim=1)
    # `batchmean` sums over K and averages over B; `mean` would divide by K too.
    return temperature**2 * F.kl_div(student, teacher, reduction="batchmean", log_target=True)


def logit_loss(student_BK: Tensor, teacher_BK: Tensor) -> Tensor:
    """Compute the mean square difference of the logits; the teacher's get no gradient.

    Source: Ba and Caruana 2014 (arXiv 1312.6184), who regress on logits; Kim et al. 2021 (arXiv 2105.08919), who
    compare it with the divergence.
    """
    return F.mse_loss(student_BK, teacher_BK.detach())


def hidden_loss(student_BTD: Tensor, teacher_BTD: Tensor, kind: HiddenKind = "cosine") -> Tensor:
    """Compute how far the student's hidden states are from the teacher's, averaged over the tokens.

    Args:
        student_BTD: residual stream behind one of the student's blocks, projected to the teacher's width if need be.
        teacher_BTD: the teacher's, which gets no gradient.
        kind: `cosine`, one less the cosine of the two vectors of a token, from 0 to 2; `mse`, mean square difference.

    Raises:
        LabError: for another kind.

    Source: Sanh et al. 2019 (arXiv 1910.01108), DistilBERT, for the cosine; Jiao et al. 2019 (arXiv 1909.10351),
    TinyBERT, for the mean square.
    """
    if kind not in get_args(HiddenKind):
        raise LabError(one_of(say(en="kind of hidden loss", fr="sorte de perte cachée"), kind, get_args(HiddenKind)))
    teacher_BTD = teacher_BTD.detach()
    if kind == "mse":
        return F.mse_loss(student_BTD, teacher_BTD)
    return (1 - F.cosine_similarity(student_BTD, teacher_BTD, dim=-1)).mean()  # (B, T) → a scalar


def label_loss(student_BK: Tensor, labels_B: Tensor) -> Tensor:
    """Compute the cross-entropy with the known labels, averaged over these; 0 where none of the batch is."""
    labelled_B = labels_B != UNKNOWN
    if not bool(labelled_B.any()):
        return student_BK.sum() * 0.0  # 0, but with a graph, so that backward runs
    return F.cross_entropy(student_BK[labelled_B], labels_B[labelled_B])


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Weights of the parts of the student's loss.

    Args:
        soft: weight of the softened probabilities.
        logits: weight of the mean square of the logits.
        hidden: weight of the hidden states.
        labels: weight of the true labels; 0 is to learn without any.
        temperature: of the softened probabilities.
        hidden_kind: `cosine` or `mse`.

    Raises:
        LabError: if a weight is negative or not finite, all are 0, or the temperature is not positive.
    """

    soft: float = 0.9
    logits: float = 0.0
    hidden: float = 0.0
    labels: float = 0.1
    temperature: float = 4.0
    hidden_kind: HiddenKind = "cosine"

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        for name in _WEIGHTS:
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise refusal(
                    en=f"the weight {name} must be a finite number, at least 0, but {value!r} was received.",
                    fr=f"le poids {name} doit être un nombre fini, positif ou nul, mais {value!r} a été reçu.",
                )
        if not any(getattr(self, name) for name in _WEIGHTS):
            raise refusal(
                en="the weights soft, logits, hidden and labels are all 0: the student would learn nothing; give "
                "at least one of them a positive weight.",
                fr="les poids soft, logits, hidden et labels sont tous nuls : l’étudiant n’apprendrait rien ; "
                "donnez un poids positif à l’un d’eux au moins.",
            )
        hidden_loss(torch.zeros(1, 1, 1), torch.zeros(1, 1, 1), self.hidden_kind)  # which refuses another kind

    @property
    def needs_teacher(self) -> bool:
        """Whether anything but the labels counts."""
        return bool(self.soft or self.logits or self.hidden)

    def of_logits(self, student_BK: Tensor, teacher_BK: Tensor | None, labels_B: Tensor) -> Tensor:
        """Compute the part of the loss that the logits decide; what has weight 0 is not computed.

        Args:
            teacher_BK: logits of the teacher; None where no weight needs them.
            labels_B: true classes, `UNKNOWN` where nobody has told them; not read where their weight is 0.
        """
        total = student_BK.new_zeros(())
        if teacher_BK is not None and self.soft:
            total = total + self.soft * soft_loss(student_BK, teacher_BK, self.temperature)
        if teacher_BK is not None and self.logits:
            total = total + self.logits * logit_loss(student_BK, teacher_BK)
        if self.labels:
            total = total + self.labels * label_loss(student_BK, labels_B)
        return total


Initialisation = Literal["random", "teacher"]


class LargerStudentWarning(UserWarning):
    """The student has more parameters than its teacher, or as many."""


@dataclass(frozen=True)
class Distilled:
    """Result of a distillation.

    Args:
        student: in evaluation mode.
        notes: what a reader must know of it, a sentence each.
    """

    student: nn.Module
    losses: list[float]
    notes: tuple[str, ...] = ()


def new_student(name: str, teacher: nn.Module, task: Task, seed: int, initialise: Initialisation) -> nn.Module:
    """Build an untrained student of the catalogue.

    Args:
        teacher: whose blocks it may begin with.
        initialise: `random`, or `teacher`: its blocks are copies of as many of the teacher's, evenly spread.

    Raises:
        LabError: for another word, or if the teacher's blocks do not fit.
    """
    legal = get_args(Initialisation)
    if initialise not in legal:
        raise LabError(one_of("initialise", initialise, legal))
    student = new_model(name, task, seed)
    if initialise == "teacher":
        copy_blocks(student, teacher)
    return student


def layer_map(student_depth: int, teacher_depth: int) -> list[int]:
    """Map each block of the student to a block of the teacher, counted from 0: evenly spread, the last to the last.

    Raises:
        LabError: if the student has more blocks than the teacher, or none.

    Example:
        >>> layer_map(2, 4)
        [1, 3]

    Source: Jiao et al. 2019 (arXiv 1909.10351), TinyBERT, whose uniform mapping this is.
    """
    if not 1 <= student_depth <= teacher_depth:
        raise refusal(
            en=f"hidden states are matched block by block: the student must have from 1 to {teacher_depth} middle "
            f"blocks, as many as its teacher, but it has {student_depth}.",
            fr="les états cachés sont rapprochés bloc par bloc : l’étudiant doit avoir de 1 à "
            f"{teacher_depth} blocs intermédiaires, autant que son professeur, mais il en a {student_depth}.",
        )
    # The last block of each stretch of the teacher's, so that the last meets the last.
    return [(index + 1) * teacher_depth // student_depth - 1 for index in range(student_depth)]


def copy_blocks(student: nn.Module, teacher: nn.Module) -> list[int]:
    """Copy the teacher's first and last block and evenly spread middle blocks into the student; returns the latter.

    Of four middle blocks a student of two gets the first and the third, counted from 1: each begins a pair that it
    replaces.

    Raises:
        LabError: if the two are not of the same widths, or the student has more blocks.

    Source: Sanh et al. 2019 (arXiv 1910.01108), DistilBERT: one layer out of two.
    """
    blocks, sources = middle_blocks(student), middle_blocks(teacher)
    if len(blocks) > len(sources):
        raise refusal(
            en=f"the student cannot begin with its teacher's blocks: it has {len(blocks)} middle blocks, its teacher "
            f"only {len(sources)}: use initialise=random, or a student of no more blocks than its teacher.",
            fr=f"l’étudiant ne peut pas partir des blocs de son professeur : il a {len(blocks)} blocs intermédiaires, "
            f"son professeur seulement {len(sources)} ; prenez initialise=random, ou un étudiant qui n’a pas plus "
            "de blocs que son professeur.",
        )
    ends = [index * len(sources) // len(blocks) for index in range(len(blocks))]
    pairs = [(blocks[position], sources[index]) for position, index in enumerate(ends)]
    if isinstance(student, BlockList) and isinstance(teacher, BlockList):
        pairs += [(student.blocks[end], teacher.blocks[end]) for end in (0, -1)]  # stem and head
    # All shapes are compared before a block is copied.
    if any(_shapes(block) != _shapes(source) for block, source in pairs):
        raise refusal(
            en="the student cannot begin with its teacher's blocks, which are of other shapes than its own: use "
            "initialise=random, or a student of the same family and width, such as vit_mini for vit_tiny.",
            fr="l’étudiant ne peut pas partir des blocs de son professeur, qui n’ont pas les mêmes formes que les "
            "siens : prenez initialise=random, ou un étudiant de la même famille et de même largeur, comme "
            "vit_mini pour vit_tiny.",
        )
    for block, source in pairs:
        block.load_state_dict(source.state_dict())
    return ends


def middle_blocks(model: nn.Module) -> list[nn.Module]:
    """List the blocks of a model without its stem and its head.

    Raises:
        LabError: if the model is no list of blocks.
    """
    if not isinstance(model, BlockList) or len(model.blocks) < 3:
        raise refusal(
            en=f"hidden states are those of a list of blocks, but {type(model).__name__} is none: use a model of "
            "the catalogue.",
            fr=f"les états cachés sont ceux d’une liste de blocs, ce que {type(model).__name__} n’est pas : prenez "
            "un modèle du catalogue.",
        )
    return list(model.blocks)[1:-1]


def distil(
    student: nn.Module,
    teacher: nn.Module,
    task: Task,
    settings: Settings,
    mixture: Mixture | None = None,
    *,
    progress: Progress | None = None,
) -> Distilled:
    """Train a student in place on what a teacher answers.

    Args:
        teacher: what it learns from; not changed.
        task: the images, and the labels where `mixture` gives them weight.
        mixture: of what the loss is made; by default 0.9 of softened probabilities at T = 4 and 0.1 of the labels.

    Raises:
        LabError: if hidden states are to be matched that have nothing in common but their width, or not even that.
    """
    mixture = mixture or Mixture()
    notes = tuple(filter(None, [larger_student(parameters(student), parameters(teacher))]))
    for sentence in notes:
        warnings.warn(sentence, LargerStudentWarning, stacklevel=2)
    teacher.eval()  # no dropout, and BatchNorm keeps its running statistics
    if not mixture.hidden:
        losses = fit(student, task, settings, loss=_logit_loss_of(teacher, mixture), progress=progress)
        return Distilled(student, losses, notes)
    learner = _Matched(student, teacher, task, settings.seed)
    losses = fit(learner, task, settings, loss=learner.loss_of(mixture), progress=progress)
    return Distilled(student, losses, notes)


def larger_student(count: int, limit: int) -> str | None:
    """Warn of a student whose parameters are no fewer than its teacher's; None for a smaller one."""
    if count < limit:
        return None
    return say(
        en=f"the student has {integer(count)} parameters and its teacher {integer(limit)}: it is not smaller, so "
        "nothing is gained in size.",
        fr=f"l’étudiant a {integer(count)} paramètres et son professeur {integer(limit)} : il n’est pas plus "
        "petit, donc rien n’est gagné en taille.",
    )


def _shapes(block: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in block.state_dict().items()}


def _logit_loss_of(teacher: nn.Module, mixture: Mixture) -> Loss:
    def loss(model: nn.Module, inputs: Tensor, labels_B: Tensor) -> Tensor:
        teacher_BK = None
        if mixture.needs_teacher:
            with torch.no_grad():
                teacher_BK = teacher(inputs)
        return mixture.of_logits(model(inputs), teacher_BK, labels_B)

    return loss


class _Matched(nn.Module):
    """A student, and a linear layer to the teacher's width for each of its blocks where the widths differ.

    The teacher is no part of this module: its parameters would be trained.
    """

    def __init__(self, student: nn.Module, teacher: nn.Module, task: Task, seed: int) -> None:
        super().__init__()
        student_blocks, teacher_blocks = middle_blocks(student), middle_blocks(teacher)
        pairs = list(
            zip(
                student_blocks,
                (teacher_blocks[index] for index in layer_map(len(student_blocks), len(teacher_blocks))),
                strict=True,
            )
        )
        self.student = student
        # nn.Module registers modules, but not those in a tuple: the teacher stays out of `parameters()`.
        self._parts = (
            teacher,
            [student_block for student_block, _ in pairs],
            [teacher_block for _, teacher_block in pairs],
        )
        # One image tells the widths of all hidden states.
        with torch.no_grad(), _outputs(self._parts[1]) as mine_BTD, _outputs(self._parts[2]) as other_BTD:
            sample = task.inputs_NCHW[:1]
            student(sample), teacher(sample)
        torch.manual_seed(seed)  # for the weights of the projections
        self.projections = nn.ModuleList(
            _projection(student_state, teacher_state)
            for student_state, teacher_state in zip(mine_BTD, other_BTD, strict=True)
        )

    def loss_of(self, mixture: Mixture) -> Loss:
        """The logits' part and the hidden states' together."""
        teacher, student_blocks, teacher_blocks = self._parts

        def loss(model: nn.Module, inputs: Tensor, labels_B: Tensor) -> Tensor:
            with torch.no_grad(), _outputs(teacher_blocks) as teacher_states:
                teacher_BK = teacher(inputs)
            with _outputs(student_blocks) as states:
                student_BK = self.student(inputs)
            # One loss for each pair of blocks; both lists are in the order of the forward pass.
            block_losses = [
                hidden_loss(projection(own_BTD), other_BTD, mixture.hidden_kind)
                for projection, own_BTD, other_BTD in zip(self.projections, states, teacher_states, strict=True)
            ]
            return (
                mixture.of_logits(student_BK, teacher_BK, labels_B) + mixture.hidden * torch.stack(block_losses).mean()
            )

        return loss


def _projection(own_BTD: Tensor, other_BTD: Tensor) -> nn.Module:
    if own_BTD.dim() != 3 or own_BTD.shape[:-1] != other_BTD.shape[:-1]:
        raise refusal(
            en="hidden states are matched token by token, but the student's are of shape "
            f"{tuple(own_BTD.shape)} and the teacher's {tuple(other_BTD.shape)} (batch, tokens, width): use two "
            "transformers that cut the image into the same patches, or match probabilities or logits.",
            fr="les états cachés sont rapprochés token par token, mais ceux de l’étudiant ont la forme "
            f"{tuple(own_BTD.shape)} et ceux du professeur {tuple(other_BTD.shape)} (lot, tokens, largeur) : "
            "prenez deux transformers qui découpent l’image en mêmes patchs, ou rapprochez les probabilités ou "
            "les logits.",
        )
    same_width = own_BTD.shape[-1] == other_BTD.shape[-1]
    return nn.Identity() if same_width else nn.Linear(own_BTD.shape[-1], other_BTD.shape[-1], device=own_BTD.device)


@contextmanager
def _outputs(blocks: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """What blocks give while this is open, in the order in which they run."""
    outputs: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda _module, _inputs, output: outputs.append(output)) for block in blocks]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


STUDENT_SEED = 100
"""Added to the seed of a training: a student does not begin with the weights that its teacher began with."""
