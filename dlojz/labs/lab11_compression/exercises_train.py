"""Exercises of lab 11 on training: loops through a rounding (QAT) and with pruned weights, losses of distillation.

A loop is judged by the weights that it leaves in a small model: two linear layers, a few batches, a plain optimizer. In
distillation the student gets a gradient, the teacher none; labels may be known for some samples, for all, or for none.

Shape suffixes: B samples, K classes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlojz.labs.kit.exercise import Mistake, Said
from dlojz.labs.kit.exercise_texts import Texts, edited_when_called
from dlojz.labs.kit.judges import gradient_of, normal, refuse_nothing
from dlojz.labs.kit.rank_judges import same
from dlojz.labs.lab11_compression.exercises_quantize import fake_quantize

TEXTS = Texts(__file__)

Batches = Sequence[tuple[Tensor, Tensor]]
Loop = Callable[..., Any]
NAMES = ("0.weight", "2.weight")
"""The matrices of the small model."""
INPUTS, HIDDEN, CLASSES, BATCHES = 6, 8, 4, 4


def train_aware(
    model: nn.Module, names: Sequence[str], batches: Batches, optimizer: torch.optim.Optimizer, bits: int
) -> None:
    """Train a model in place, some of its matrices being rounded in every forward pass.

    Args:
        model: images in, logits out.
        names: of the matrices; the scale of a row follows its largest weight.
        batches: pairs of images and labels; each is one update.
        optimizer: of the model's parameters, which stay floating-point numbers.
        bits: of a rounded weight.

    Source: Bengio et al. 2013 (arXiv 1308.3432) for the gradient; Jacob et al. 2018 (arXiv 1712.05877), section 3.
    """
    _trained(model, batches, optimizer, lambda: _rounded(model, names, bits))


def _rounded(model: nn.Module, names: Sequence[str], bits: int) -> Any:
    high, rounded_weights = 2 ** (bits - 1) - 1, {}
    for name in names:
        weight = model.get_parameter(name)
        # Detached: no gradient reaches the weights by way of their scale.
        scale_O1 = weight.detach().abs().amax(1, keepdim=True) / high
        rounded_weights[name] = fake_quantize(weight, scale_O1, bits)
    return rounded_weights


def _trained(
    model: nn.Module,
    batches: Batches,
    optimizer: torch.optim.Optimizer,
    weights: Callable[[], Mapping[str, Tensor]],
    after: Callable[[], object] = lambda: None,
) -> None:
    """The loop of both exercises and of their mistakes: which weights are computed with, what follows an update."""
    for images, labels in batches:
        # Names without an entry keep the model's own parameters: `dict`, which makes an empty one, is the plain loop.
        # Rounded matrices are functions of the parameters, so backward fills the `.grad` of these.
        loss = F.cross_entropy(torch.func.functional_call(model, dict(weights()), (images,)), labels)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        after()


def _small_model(seed: int) -> tuple[nn.Module, Batches]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
    batches = [(normal(10 * seed + index, 12, INPUTS), torch.arange(12) % CLASSES) for index in range(BATCHES)]
    return model, batches


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _aware_trial(answer: Loop, seed: int, bits: int) -> Tensor:
    model, batches = _small_model(seed)
    answer(model, list(NAMES), batches, torch.optim.SGD(model.parameters(), lr=0.5), bits)
    return _flat(model)


def _old_scales(model: nn.Module, names: Sequence[str], batches: Batches, optimizer: Any, bits: int) -> None:
    """The loop with the scales that the weights had before it."""
    before = {name: model.get_parameter(name).detach().abs().amax(1, keepdim=True) for name in names}
    high = 2 ** (bits - 1) - 1

    def rounded() -> dict[str, Tensor]:
        return {name: fake_quantize(model.get_parameter(name), before[name] / high, bits) for name in names}

    _trained(model, batches, optimizer, rounded)


def _write_rounded(model: nn.Module, names: Sequence[str], bits: int) -> None:
    for name, weight in _rounded(model, names, bits).items():
        # By `.data` the optimizer's parameter stays the same object.
        model.get_parameter(name).data = weight.detach()


def _overwritten(model: nn.Module, names: Any, batches: Batches, optimizer: Any, bits: int) -> None:
    for batch in batches:
        _write_rounded(model, names, bits)
        _trained(model, [batch], optimizer, dict)


def _rounded_once(model: nn.Module, names: Any, batches: Batches, optimizer: Any, bits: int) -> None:
    _write_rounded(model, names, bits)
    _trained(model, batches, optimizer, dict)


def _rounded_at_the_end(model: nn.Module, names: Any, batches: Batches, optimizer: Any, bits: int) -> None:
    train_aware(model, names, batches, optimizer, bits)
    _write_rounded(model, names, bits)


_NOT_CLEARED = TEXTS.sentence("shared", "gradients of earlier batches are added")
_KEEPS_GRADIENTS = "optimizer.zero_grad() → pass"
_NOT_TRAINED = TEXTS.sentence("shared", "the weights have not moved")


AWARE_TRAINING = TEXTS.exercise(
    "aware-training",
    train_aware,
    trial=_aware_trial,
    cases=((1, 2), (2, 3), (3, 4)),
    source=(train_aware, _trained, _rounded),
    mistakes={
        "the gradients are never zeroed": Mistake(
            edited_when_called((train_aware, _trained), _KEEPS_GRADIENTS), *_NOT_CLEARED
        ),
        "nothing is trained": Mistake(lambda *_: None, *_NOT_TRAINED),
        "you write the rounded weights over the floating-point ones": _overwritten,
        "rounded once, before the loop": _rounded_once,
        "rounded weights written at the end": _rounded_at_the_end,
        "the scales are computed once": _old_scales,
    },
)


def train_pruned(
    model: nn.Module, masks: Mapping[str, Tensor], batches: Batches, optimizer: torch.optim.Optimizer
) -> None:
    """Prune a model by its masks, then train in place what they leave.

    Args:
        model: images in, logits out.
        masks: by the parameter's name, 1 where a weight stays.
        batches: pairs of images and labels; each is one update.
        optimizer: may hold a momentum of updates before.

    Source: Han et al. 2015 (arXiv 1506.02626), section 3.
    """
    _masked(model, masks)
    _trained(model, batches, optimizer, dict, lambda: _masked(model, masks))


def _masked(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    for name, mask in masks.items():
        # In place and outside of autograd: the parameter, which the optimizer holds, stays the same object.
        model.get_parameter(name).data.mul_(mask)


def _pruned_trial(answer: Loop, seed: int, decay: float) -> Tensor:
    model, batches = _small_model(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.8, weight_decay=decay)
    _trained(model, batches[:1], optimizer, dict)  # so that there is a momentum
    shapes = {name: model.get_parameter(name).shape for name in NAMES}
    # P(|z| > 0.6) = 0.55: somewhat more than half of the weights stay.
    masks = {name: (normal(seed + 5, *shape).abs() > 0.6).float() for name, shape in shapes.items()}
    answer(model, masks, batches, optimizer)
    return _flat(model)


def _masked_gradients(model: nn.Module, masks: Any, batches: Batches, optimizer: Any) -> None:
    _masked(model, masks)
    for images, labels in batches:
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        for name, mask in masks.items():
            gradient = model.get_parameter(name).grad
            assert gradient is not None
            gradient.mul_(mask)
        optimizer.step()


def _masked_at_the_end(model: nn.Module, masks: Any, batches: Batches, optimizer: Any) -> None:
    _trained(model, batches, optimizer, dict)
    _masked(model, masks)


PRUNED_TRAINING = TEXTS.exercise(
    "pruned-training",
    train_pruned,
    trial=_pruned_trial,
    cases=((4, 0.0), (5, 0.01), (6, 0.1)),
    mistakes={
        "you mask the gradients": _masked_gradients,
        "pruned only after the training": _masked_at_the_end,
        "the first forward pass still sees the dense weights": lambda model, masks, batches, optimizer: _trained(
            model, batches, optimizer, dict, lambda: _masked(model, masks)
        ),
        "the gradients are never zeroed": Mistake(
            edited_when_called((train_pruned, _trained), _KEEPS_GRADIENTS), *_NOT_CLEARED
        ),
        "nothing is trained": Mistake(lambda *_: None, *_NOT_TRAINED),
        "pruned, but not trained": lambda model, masks, batches, optimizer: _masked(model, masks),
    },
)


Way = Callable[..., Any]


def soft_loss(student_BK: Tensor, teacher_BK: Tensor, temperature: float) -> Tensor:
    """Compute T² times the mean over samples of KL(teacher ‖ student), both softened by T, teacher detached.

    Source: Hinton et al. 2015, "Distilling the Knowledge in a Neural Network" (arXiv 1503.02531), section 2.
    """
    p_BK = (teacher_BK.detach() / temperature).softmax(-1)
    log_q_BK = (student_BK / temperature).log_softmax(-1)
    # Σ p log p has no gradient for the student: it only makes the loss 0 where both answer alike.
    return temperature**2 * (p_BK * (p_BK.log() - log_q_BK)).sum(-1).mean()


def _soft_cases() -> Iterator[tuple[Any, ...]]:
    for seed, samples, classes, temperature in ((1, 6, 5, 2.0), (2, 9, 3, 4.0), (3, 4, 7, 0.5)):
        yield 2 * normal(seed, samples, classes), 2 * normal(seed + 10, samples, classes), temperature


def _check_gradients(answer: Way) -> None:
    for student_BK, teacher_BK, temperature in _soft_cases():
        student_BK.requires_grad_()
        teacher_BK.requires_grad_()
        # A value says nothing of its graph: whose gradient is cut shows in autograd alone.
        student_gradient = gradient_of(answer(student_BK, teacher_BK, temperature), student_BK)
        reference_gradient = gradient_of(soft_loss(student_BK, teacher_BK, temperature), student_BK)
        if student_gradient is None or reference_gradient is None or not same(student_gradient, reference_gradient):
            raise TEXTS.wrong("soft-loss", "no gradient of the student, or a wrong one")
        if gradient_of(answer(student_BK, teacher_BK, temperature), teacher_BK) is not None:
            raise TEXTS.wrong("soft-loss", "a gradient of the teacher")


SOFT_LOSS = TEXTS.exercise(
    "soft-loss",
    soft_loss,
    cases=_soft_cases,
    then=_check_gradients,
)


UNKNOWN = -1
"""The label of a sample that has none."""


def mixed_loss(student_BK: Tensor, teacher_BK: Tensor, labels_B: Tensor, temperature: float, alpha: float) -> Tensor:
    """Mix the soft loss of all samples (alpha) with the cross-entropy of the labelled ones (1 − alpha).

    Args:
        labels_B: classes, `UNKNOWN` where there is none; where nobody has one, the second term is 0.
        temperature: of the soft loss alone.
        alpha: from 0 to 1.
    """
    known_B = labels_B != UNKNOWN
    soft = alpha * soft_loss(student_BK, teacher_BK, temperature)
    if not known_B.any():
        return soft
    return soft + (1 - alpha) * F.cross_entropy(student_BK[known_B], labels_B[known_B])


def _mixed_cases() -> Iterator[tuple[Any, ...]]:
    for seed, unknown, temperature, alpha in ((4, 3, 3.0, 0.7), (5, 5, 2.0, 0.2), (6, 1, 4.0, 0.4)):
        generator = torch.Generator().manual_seed(seed)
        labels_B = torch.randint(5, (8,), generator=generator)
        labels_B[torch.randperm(8, generator=generator)[:unknown]] = UNKNOWN
        yield 2 * normal(seed, 8, 5), 2 * normal(seed + 10, 8, 5), labels_B, temperature, alpha


def _check_labels(answer: Way) -> None:
    student_BK, teacher_BK = normal(7, 6, 5), normal(8, 6, 5)
    # No label at all, then all of them: each case before has both kinds of samples.
    for labels_B in (torch.full((6,), UNKNOWN), torch.arange(6) % 5):
        loss, reference_loss = (loss_of(student_BK, teacher_BK, labels_B, 2.0, 0.5) for loss_of in (answer, mixed_loss))
        if loss is None:
            refuse_nothing(None)
        loss = torch.as_tensor(loss)
        if same(loss, reference_loss):
            continue
        if not bool((labels_B == UNKNOWN).all()):
            raise TEXTS.wrong("mixed-loss", "unknown labels: all samples divide")
        if bool(loss.isnan().any()):
            raise TEXTS.wrong("mixed-loss", "unknown labels: a mean of two")
        if same(loss, soft_loss(student_BK, teacher_BK, 2.0)):
            raise TEXTS.wrong("mixed-loss", "unknown labels: nothing is left out")
        raise TEXTS.wrong("mixed-loss", "unknown labels: another loss")


MIXED_LOSS = TEXTS.exercise(
    "mixed-loss",
    mixed_loss,
    cases=_mixed_cases,
    leaves={0: Said("the student's logits", "les logits de l’étudiant")},
    then=_check_labels,
)
