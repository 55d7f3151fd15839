"""A student that learns from a teacher: what it is built from, which blocks answer to which, and its training.

Layer 2, on `fitting` and `distillation_losses`. Invariant: the teacher runs without gradients, in evaluation mode, and
leaves with the weights that it came with; the student alone, and what projects its stream, are updated.

Shape suffixes: B batch, T tokens, D width, K classes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from dlojz.compress.distillation_losses import Mixture, hidden_loss
from dlojz.compress.fitting import Loss, Progress, Settings, fit, new_model
from dlojz.compress.measuring import parameters
from dlojz.compress.task import Task
from dlojz.models.blocks import BlockList
from dlojz.schema import LabError, one_of
from dlojz.text import say

Initialisation = Literal["random", "teacher"]


class LargerStudentWarning(UserWarning):
    """The student has more parameters than its teacher, or as many."""


@dataclass(frozen=True)
class Distilled:
    """What a distillation gives.

    Args:
        student: in evaluation mode.
        losses: of every step.
        notes: what a reader must know of it, a sentence each.
    """

    student: nn.Module
    losses: list[float]
    notes: tuple[str, ...] = ()


def new_student(name: str, teacher: nn.Module, task: Task, seed: int, initialise: Initialisation) -> nn.Module:
    """A student of the catalogue before it has learnt.

    Args:
        name: in the catalogue of models.
        teacher: whose blocks it may begin with.
        task: what it is to answer.
        seed: of its weights.
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
    """The block of the teacher, counted from 0, that each block of the student answers to: evenly spread, the last to
    the last.

    Raises:
        LabError: if the student has more blocks than the teacher, or none.

    Example:
        >>> layer_map(2, 4)
        [1, 3]

    Source: Jiao et al. 2019 (arXiv 1909.10351), TinyBERT, whose uniform mapping this is.
    """
    if not 1 <= student_depth <= teacher_depth:
        raise LabError(
            say(
                en=f"hidden states are matched block by block: the student must have from 1 to {teacher_depth} middle "
                f"blocks, as many as its teacher, but it has {student_depth}.",
                fr="les états cachés sont rapprochés bloc par bloc : l’étudiant doit avoir de 1 à "
                f"{teacher_depth} blocs intermédiaires, autant que son professeur, mais il en a {student_depth}.",
            )
        )
    return [(index + 1) * teacher_depth // student_depth - 1 for index in range(student_depth)]


def copy_blocks(student: nn.Module, teacher: nn.Module) -> list[int]:
    """Give the student the teacher's first and last block, and one in so many of those between; returns these.

    Of four middle blocks a student of two gets the first and the third, counted from 1: each begins a pair that it
    replaces.

    Raises:
        LabError: if the two are not of the same widths, or the student has more blocks.

    Source: Sanh et al. 2019 (arXiv 1910.01108), DistilBERT: one layer out of two.
    """
    own, others = middle_blocks(student), middle_blocks(teacher)
    if len(own) > len(others):
        raise LabError(
            say(
                en=f"the student cannot begin with its teacher's blocks: it has {len(own)} middle blocks, its teacher "
                f"only {len(others)}: use initialise=random, or a student of no more blocks than its teacher.",
                fr=f"l’étudiant ne peut pas partir des blocs de son professeur : il a {len(own)} blocs intermédiaires, "
                f"son professeur seulement {len(others)} ; prenez initialise=random, ou un étudiant qui n’a pas plus "
                "de blocs que son professeur.",
            )
        )
    ends = [index * len(others) // len(own) for index in range(len(own))]
    pairs = [(own[place], others[index]) for place, index in enumerate(ends)]
    if isinstance(student, BlockList) and isinstance(teacher, BlockList):
        pairs += [(student.blocks[end], teacher.blocks[end]) for end in (0, -1)]
    if any(_shapes(one) != _shapes(other) for one, other in pairs):
        raise LabError(
            say(
                en="the student cannot begin with its teacher's blocks, which are of other shapes than its own: use "
                "initialise=random, or a student of the same family and width, such as vit_mini for vit_tiny.",
                fr="l’étudiant ne peut pas partir des blocs de son professeur, qui n’ont pas les mêmes formes que les "
                "siens : prenez initialise=random, ou un étudiant de la même famille et de même largeur, comme "
                "vit_mini pour vit_tiny.",
            )
        )
    for mine, other in pairs:
        mine.load_state_dict(other.state_dict())
    return ends


def middle_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model but its stem and its head.

    Raises:
        LabError: if the model is no list of blocks.
    """
    if not isinstance(model, BlockList) or len(model.blocks) < 3:
        raise LabError(
            say(
                en=f"hidden states are those of a list of blocks, but {type(model).__name__} is none: use a model of "
                "the catalogue.",
                fr=f"les états cachés sont ceux d’une liste de blocs, ce que {type(model).__name__} n’est pas : prenez "
                "un modèle du catalogue.",
            )
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
        student: what is trained.
        teacher: what it learns from; not changed.
        task: the images, and the labels where `mixture` gives them weight.
        settings: how long and how fast.
        mixture: of what the loss is made; by default 0.9 of softened probabilities at T = 4 and 0.1 of the labels.
        progress: told after each step.

    Raises:
        LabError: if hidden states are to be matched that have nothing in common but their width, or not even that.
    """
    mixture = mixture or Mixture()
    notes = tuple(filter(None, [larger_student(student, teacher)]))
    for sentence in notes:
        warnings.warn(sentence, LargerStudentWarning, stacklevel=2)
    teacher.eval()
    if not mixture.hidden:
        losses = fit(student, task, settings, loss=_logit_loss_of(teacher, mixture), progress=progress)
        return Distilled(student, losses, notes)
    learner = _Matched(student, teacher, task, settings.seed)
    losses = fit(learner, task, settings, loss=learner.loss_of(mixture), progress=progress)
    return Distilled(student, losses, notes)


def larger_student(student: nn.Module, teacher: nn.Module) -> str | None:
    """The sentence that warns of a student that is no smaller than its teacher; None for one that is."""
    return larger_student_sentence(parameters(student), parameters(teacher))


def larger_student_sentence(own: int, others: int) -> str | None:
    """The same, from the numbers of parameters."""
    if own < others:
        return None
    return say(
        en=f"the student has {own:,} parameters and its teacher {others:,}: it is not smaller, so nothing is gained in "
        "size.",
        fr=f"l’étudiant a {_thousands(own)} paramètres et son professeur {_thousands(others)} : il n’est pas plus "
        "petit, donc rien n’est gagné en taille.",
    )


def _thousands(number: int) -> str:
    return f"{number:,}".replace(",", "\u202f")


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
        own, others = middle_blocks(student), middle_blocks(teacher)
        pairs = list(zip(own, (others[index] for index in layer_map(len(own), len(others))), strict=True))
        self.student = student
        self._parts = (teacher, [mine for mine, _ in pairs], [other for _, other in pairs])
        with torch.no_grad(), _outputs(self._parts[1]) as mine_BTD, _outputs(self._parts[2]) as other_BTD:
            sample = task.inputs_NCHW[:1]
            student(sample), teacher(sample)
        torch.manual_seed(seed)
        self.projections = nn.ModuleList(
            _projection(one, other) for one, other in zip(mine_BTD, other_BTD, strict=True)
        )

    def loss_of(self, mixture: Mixture) -> Loss:
        """The logits' part and the hidden states' together."""
        teacher, mine, others = self._parts

        def loss(model: nn.Module, inputs: Tensor, labels_B: Tensor) -> Tensor:
            with torch.no_grad(), _outputs(others) as teacher_states:
                teacher_BK = teacher(inputs)
            with _outputs(mine) as states:
                student_BK = self.student(inputs)
            each = [
                hidden_loss(projection(own_BTD), other_BTD, mixture.hidden_kind)
                for projection, own_BTD, other_BTD in zip(self.projections, states, teacher_states, strict=True)
            ]
            return mixture.of_logits(student_BK, teacher_BK, labels_B) + mixture.hidden * torch.stack(each).mean()

        return loss


def _projection(own_BTD: Tensor, other_BTD: Tensor) -> nn.Module:
    if own_BTD.dim() != 3 or own_BTD.shape[:-1] != other_BTD.shape[:-1]:
        raise LabError(
            say(
                en="hidden states are matched token by token, but the student's are of shape "
                f"{tuple(own_BTD.shape)} and the teacher's {tuple(other_BTD.shape)} (batch, tokens, width): use two "
                "transformers that cut the image into the same patches, or match probabilities or logits.",
                fr="les états cachés sont rapprochés token par token, mais ceux de l’étudiant ont la forme "
                f"{tuple(own_BTD.shape)} et ceux du professeur {tuple(other_BTD.shape)} (lot, tokens, largeur) : "
                "prenez deux transformers qui découpent l’image en mêmes patchs, ou rapprochez les probabilités ou "
                "les logits.",
            )
        )
    same = own_BTD.shape[-1] == other_BTD.shape[-1]
    return nn.Identity() if same else nn.Linear(own_BTD.shape[-1], other_BTD.shape[-1], device=own_BTD.device)


@contextmanager
def _outputs(blocks: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """What blocks give while this is open, in the order in which they run."""
    seen: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda _module, _inputs, output: seen.append(output)) for block in blocks]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
