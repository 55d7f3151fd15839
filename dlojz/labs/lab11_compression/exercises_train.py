"""Exercises of lab 11 whose answer is a training loop: through a rounding (QAT), and with pruned weights held at zero.

A loop is judged by the weights that it leaves in a small model: two linear layers, a few batches, a plain optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dlojz.labs.kit.exercise import Exercise, Mistake, Said
from dlojz.labs.kit.judges import Judge, normal
from dlojz.labs.lab11_compression.exercises_quantize import fake_quantize

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Batches = Sequence[tuple["Tensor", "Tensor"]]
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


def _rounded(model: nn.Module, names: Sequence[str], bits: int, *, rows: bool = True, constant: bool = True) -> Any:
    high, found = 2 ** (bits - 1) - 1, {}
    for name in names:
        weight = model.get_parameter(name)
        sizes = (weight.detach() if constant else weight).abs()
        found[name] = fake_quantize(weight, (sizes.amax(1, keepdim=True) if rows else sizes.max()) / high, bits)
    return found


def _trained(
    model: nn.Module,
    batches: Batches,
    optimizer: torch.optim.Optimizer,
    weights: Callable[[], Mapping[str, Tensor]],
    after: Callable[[], object] = lambda: None,
    *,
    cleared: bool = True,
) -> None:
    """The loop of both exercises and of their mistakes: which weights are computed with, what follows an update."""
    import torch
    import torch.nn.functional as F

    for images, labels in batches:
        loss = F.cross_entropy(torch.func.functional_call(model, dict(weights()), (images,)), labels)
        if cleared:
            optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        after()


def _small_model(seed: int) -> tuple[nn.Module, Batches]:
    import torch
    from torch import nn

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
    batches = [(normal(10 * seed + one, 12, INPUTS), torch.arange(12) % CLASSES) for one in range(BATCHES)]
    return model, batches


def _flat(model: nn.Module) -> Tensor:
    import torch

    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _aware_trial(answer: Loop, seed: int, bits: int) -> Tensor:
    import torch

    model, batches = _small_model(seed)
    answer(model, list(NAMES), batches, torch.optim.SGD(model.parameters(), lr=0.5), bits)
    return _flat(model)


def _aware_cases() -> Iterator[tuple[Any, ...]]:
    yield from ((1, 2), (2, 3), (3, 4))


def _aware(**way: bool) -> Loop:
    def loop(model: nn.Module, names: Any, batches: Batches, optimizer: Any, bits: int) -> None:
        _trained(model, batches, optimizer, lambda: _rounded(model, names, bits, **way))

    return loop


def _old_scales(model: nn.Module, names: Sequence[str], batches: Batches, optimizer: Any, bits: int) -> None:
    """The loop with the scales that the weights had before it."""
    before = {name: model.get_parameter(name).detach().abs().amax(1, keepdim=True) for name in names}
    high = 2 ** (bits - 1) - 1

    def rounded() -> dict[str, Tensor]:
        return {name: fake_quantize(model.get_parameter(name), before[name] / high, bits) for name in names}

    _trained(model, batches, optimizer, rounded)


def _write_rounded(model: nn.Module, names: Sequence[str], bits: int) -> None:
    for name, weight in _rounded(model, names, bits).items():
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


def _blocked(model: nn.Module, names: Any, batches: Batches, optimizer: Any, bits: int) -> None:
    _trained(
        model,
        batches,
        optimizer,
        lambda: {name: weight.detach() for name, weight in _rounded(model, names, bits).items()},
    )


def _first_batch(model: nn.Module, names: Any, batches: Batches, optimizer: Any, bits: int) -> None:
    train_aware(model, names, batches[:1], optimizer, bits)


_NOT_CLEARED = Said(
    "Gradients of earlier batches are added to those of this one: optimizer.zero_grad() in every step.",
    "Les gradients des batches précédents s’ajoutent à ceux du batch présent : optimizer.zero_grad() à chaque pas.",
)
_NOT_TRAINED = Said(
    "The weights have not moved at all: loss.backward() computes gradients, and optimizer.step() makes the update.",
    "Les poids n’ont pas bougé : loss.backward() calcule les gradients, et optimizer.step() fait la mise à jour.",
)


AWARE_TRAINING = Exercise(
    id="aware-training",
    title=Said("the loop of quantization-aware training", "la boucle de quantization-aware training"),
    judge=Judge(
        train_aware,
        trial=_aware_trial,
        cases=_aware_cases,
        mistakes=(
            Mistake(
                lambda model, names, batches, optimizer, bits: _trained(model, batches, optimizer, dict),
                "Your loop trains without any rounding: hand the rounded matrices to torch.func.functional_call.",
                "Votre boucle entraîne sans aucun arrondi : donnez les matrices arrondies à "
                "torch.func.functional_call.",
            ),
            Mistake(
                lambda model, names, batches, optimizer, bits: _trained(
                    model, batches, optimizer, lambda: _rounded(model, names, bits), cleared=False
                ),
                *_NOT_CLEARED,
            ),
            Mistake(lambda *_: None, *_NOT_TRAINED),
            Mistake(
                _overwritten,
                "You write the rounded weights over the floating-point ones: an update smaller than half a step is "
                "then lost each time. Keep the floating-point weights, and round a copy in each forward pass.",
                "Vous écrivez les poids arrondis par-dessus les poids flottants : une mise à jour inférieure à un "
                "demi-pas est alors perdue à chaque fois. Gardez les poids flottants, et arrondissez une copie à "
                "chaque passe avant.",
            ),
            Mistake(
                _rounded_once,
                "You round once, before the loop, and then train without rounding: the forward pass of every step "
                "must see rounded matrices.",
                "Vous arrondissez une seule fois, avant la boucle, puis entraînez sans arrondi : la passe avant de "
                "chaque pas doit voir des matrices arrondies.",
            ),
            Mistake(
                _rounded_at_the_end,
                "The training is right, but you write the rounding into the weights at the end: leave the "
                "floating-point weights, so that one can go on training.",
                "L’entraînement est juste, mais vous écrivez l’arrondi dans les poids à la fin : laissez les poids "
                "flottants, pour que l’on puisse continuer l’entraînement.",
            ),
            Mistake(
                _blocked,
                "No gradient reaches the matrices, only the biases learn: round by your fake_quantize, whose gradient "
                "passes through the rounding, and do not detach its result.",
                "Aucun gradient n’arrive aux matrices, seuls les biais apprennent : arrondissez par votre "
                "fake_quantize, que le gradient traverse, et ne détachez pas son résultat.",
            ),
            Mistake(
                _aware(rows=False),
                "You take one scale for the whole matrix: each row has its own, from its largest magnitude "
                "(amax(1, keepdim=True)).",
                "Vous prenez une seule échelle pour toute la matrice : chaque ligne a la sienne, d’après sa plus "
                "grande valeur absolue (amax(1, keepdim=True)).",
            ),
            Mistake(
                _aware(constant=False),
                "The gradient also flows through the scale, which moves the largest weight of each row: the scale is "
                "a constant here, weight.detach().abs().",
                "Le gradient passe aussi par l’échelle, ce qui déplace le plus grand poids de chaque ligne : "
                "l’échelle est ici une constante, weight.detach().abs().",
            ),
            Mistake(
                _old_scales,
                "You compute the scales once, before the loop: the weights move, and with them the largest of each "
                "row; compute the scales anew in every step.",
                "Vous calculez les échelles une seule fois, avant la boucle : les poids bougent, et avec eux le plus "
                "grand de chaque ligne ; recalculez les échelles à chaque pas.",
            ),
            Mistake(
                _first_batch,
                "Only the first batch is learnt from: is there a return, or a break, inside your loop?",
                "Seul le premier batch sert : y a-t-il un return, ou un break, dans votre boucle ?",
            ),
        ),
    ),
    praise_en="Right: the forward pass sees few bits, and small updates add up in the floating-point weights.",
    praise_fr="Exact : la passe avant voit peu de bits, et les petites mises à jour s’accumulent dans les poids "
    "flottants.",
    hint_en="The usual loop of five lines, with one difference: before the loss, make a dictionary {name: rounded "
    "matrix}, and compute with it.",
    hint_fr="La boucle habituelle en cinq lignes, à une différence près : avant la perte, faites un dictionnaire "
    "{nom: matrice arrondie}, et calculez avec lui.",
    nearer_en="model.get_parameter(name) is the matrix; the scale of its rows is the largest magnitude, detached, over "
    "2**(bits-1) - 1; torch.func.functional_call(model, rounded, (images,)) gives the logits.",
    nearer_fr="model.get_parameter(name) est la matrice ; l’échelle de ses lignes est la plus grande valeur absolue, "
    "détachée, divisée par 2**(bits-1) - 1 ; torch.func.functional_call(model, rounded, (images,)) donne les logits.",
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
        model.get_parameter(name).data.mul_(mask)


def _pruned_trial(answer: Loop, seed: int, decay: float) -> Tensor:
    import torch

    model, batches = _small_model(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.8, weight_decay=decay)
    _trained(model, batches[:1], optimizer, dict)  # so that there is a momentum
    shapes = {name: model.get_parameter(name).shape for name in NAMES}
    masks = {name: (normal(seed + 5, *shape).abs() > 0.6).float() for name, shape in shapes.items()}
    answer(model, masks, batches, optimizer)
    return _flat(model)


def _pruned_cases() -> Iterator[tuple[Any, ...]]:
    yield from ((4, 0.0), (5, 0.01), (6, 0.1))


def _masked_gradients(model: nn.Module, masks: Any, batches: Batches, optimizer: Any) -> None:
    import torch.nn.functional as F

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


def _masked_before(model: nn.Module, masks: Any, batches: Batches, optimizer: Any) -> None:
    _masked(model, masks)
    _trained(model, batches, optimizer, dict)


def _masked_before_each(model: nn.Module, masks: Any, batches: Batches, optimizer: Any) -> None:
    for batch in batches:
        _masked(model, masks)
        _trained(model, [batch], optimizer, dict)


def _masked_at_the_end(model: nn.Module, masks: Any, batches: Batches, optimizer: Any) -> None:
    _trained(model, batches, optimizer, dict)
    _masked(model, masks)


def _inverted(model: nn.Module, masks: Any, batches: Batches, optimizer: Any) -> None:
    train_pruned(model, {name: 1 - mask for name, mask in masks.items()}, batches, optimizer)


def _gathered(model: nn.Module, masks: Any, batches: Batches, optimizer: Any) -> None:
    _masked(model, masks)
    _trained(model, batches, optimizer, dict, lambda: _masked(model, masks), cleared=False)


PRUNED_TRAINING = Exercise(
    id="pruned-training",
    title=Said("the loop that keeps pruned weights at zero", "la boucle qui garde nuls les poids enlevés"),
    judge=Judge(
        train_pruned,
        trial=_pruned_trial,
        cases=_pruned_cases,
        mistakes=(
            Mistake(
                _masked_before,
                "Pruned weights grow back: the gradient of a weight that is zero is not zero. Put them to zero again "
                "after each update.",
                "Les poids enlevés repoussent : le gradient d’un poids nul n’est pas nul. Remettez-les à zéro après "
                "chaque mise à jour.",
            ),
            Mistake(
                _masked_before_each,
                "You mask before each forward pass only: what the last update has put into the pruned weights stays. "
                "Mask after the update, too.",
                "Vous masquez seulement avant chaque passe avant : ce que la dernière mise à jour a mis dans les poids "
                "enlevés y reste. Masquez aussi après la mise à jour.",
            ),
            Mistake(
                _masked_gradients,
                "You mask the gradients, but the optimizer still holds a momentum of the dense training, which moves "
                "the pruned weights: mask the weights after each update.",
                "Vous masquez les gradients, mais l’optimiseur garde un momentum de l’entraînement dense, qui déplace "
                "les poids enlevés : masquez les poids après chaque mise à jour.",
            ),
            Mistake(
                _masked_at_the_end,
                "You train the dense model and prune it at the end: then the weights that stay have not learnt to do "
                "without the others.",
                "Vous entraînez le modèle dense et l’élaguez à la fin : les poids restants n’ont alors pas appris à "
                "se passer des autres.",
            ),
            Mistake(
                lambda model, masks, batches, optimizer: _trained(
                    model, batches, optimizer, dict, lambda: _masked(model, masks)
                ),
                "The first forward pass still sees the dense weights: mask once before the loop, too.",
                "La première passe avant voit encore les poids denses : masquez une fois avant la boucle aussi.",
            ),
            Mistake(
                lambda model, masks, batches, optimizer: _trained(model, batches, optimizer, dict),
                "Your loop trains the dense model: the masks are not used.",
                "Votre boucle entraîne le modèle dense : les masques ne servent pas.",
            ),
            Mistake(
                _inverted,
                "You keep what should go: a mask is 1 where a weight stays.",
                "Vous gardez ce qui doit partir : un masque vaut 1 là où un poids reste.",
            ),
            Mistake(_gathered, *_NOT_CLEARED),
            Mistake(lambda *_: None, *_NOT_TRAINED),
            Mistake(
                lambda model, masks, batches, optimizer: _masked(model, masks),
                "The weights are pruned, but the rest is not trained: go through the batches, and mask after each "
                "update.",
                "Les poids sont élagués, mais le reste n’est pas entraîné : parcourez les batches, et masquez après "
                "chaque mise à jour.",
            ),
        ),
    ),
    praise_en="Right: whatever the optimizer does, the pruned weights are zero in every forward pass.",
    praise_fr="Exact : quoi que fasse l’optimiseur, les poids enlevés sont nuls dans chaque passe avant.",
    hint_en="The usual loop; the weights are multiplied by their masks at two places, without gradient.",
    hint_fr="La boucle habituelle ; les poids sont multipliés par leurs masques à deux endroits, sans gradient.",
    nearer_en="Before the loop and after each optimizer.step(): for each name, "
    "model.get_parameter(name).data is multiplied in place by its mask.",
    nearer_fr="Avant la boucle et après chaque optimizer.step() : pour chaque nom, "
    "model.get_parameter(name).data est multiplié en place par son masque.",
)
