"""Lab 09: the optimizer in the backward pass.

Layer 6 (labs). Invariant: an answer is held to the weights of a plain training, and then to the gradients that are
there at once: right weights alone save no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.judging import Mistake
from dlojz.labs.optimizer_trials import normal
from dlojz.labs.rank_evidence import same
from dlojz.labs.verdict import Said
from dlojz.text import say

if TYPE_CHECKING:
    from torch import Tensor, nn

MakeOptimizer = Callable[[Sequence[Any]], Any]
STEPS, SEEDS = 3, (1, 2)


def update_in_backward(model: nn.Module, make_optimizer: MakeOptimizer) -> None:
    """Update each parameter as soon as its gradient is there, and free the gradient.

    Source: Jiang et al. 2021, "Optimizer Fusion" (arXiv 2104.00237), backward-fusion.
    """
    for parameter in model.parameters():
        optimizer = make_optimizer([parameter])

        def update(parameter: Tensor, optimizer: Any = optimizer) -> None:
            optimizer.step()
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(update)


def _model(seed: int) -> nn.Module:
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 3))


def _adam(tensors: Sequence[Any]) -> Any:
    import torch

    return torch.optim.Adam(tensors, lr=0.05)


def _loss(model: nn.Module, seed: int, step: int) -> Tensor:
    return (model(normal(100 * seed + step, 8, 6)) - normal(100 * seed + step + 50, 8, 3)).square().sum()


def _weights(model: nn.Module) -> Tensor:
    import torch

    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


class _Seen:
    """What a training with an answer has shown: final weights, gradients left over, most of them at once."""

    def __init__(self, answer: Callable[..., Any], seed: int) -> None:
        model = _model(seed)
        parameters = list(model.parameters())
        self.most = 0
        for parameter in parameters:  # before the answer's own: hooks are called in the order in which they came
            parameter.register_post_accumulate_grad_hook(lambda _: self._look(parameters))
        self.begun = _weights(model)
        answer(model, _adam)
        for step in range(STEPS):
            _loss(model, seed, step).backward()
        self.left = sum(one.grad is not None for one in parameters)
        self.weights = _weights(model)

    def _look(self, parameters: Sequence[Tensor]) -> None:
        self.most = max(self.most, sum(one.numel() for one in parameters if one.grad is not None))


def _plainly(seed: int) -> Tensor:
    model = _model(seed)
    optimizer = _adam(list(model.parameters()))
    for step in range(STEPS):
        optimizer.zero_grad()
        _loss(model, seed, step).backward()
        optimizer.step()
    return _weights(model)


def _largest_layer(seed: int) -> int:
    return max(sum(one.numel() for one in layer.parameters()) for layer in _model(seed).children())


def _judge(answer: Callable[..., Any]) -> None:
    seen = [_Seen(answer, seed) for seed in SEEDS]
    right = [_plainly(seed) for seed in SEEDS]
    if not all(same(one.weights, weights) for one, weights in zip(seen, right, strict=True)):
        raise Wrong(str(_named(seen)))
    if any(one.left for one in seen):
        raise Wrong(
            say(
                en="The weights are right, but gradients are still there after the backward pass, and zeros take as "
                "much room as any numbers: parameter.grad = None frees them.",
                fr="Les poids sont justes, mais les gradients sont toujours là après la passe arrière, et des zéros "
                "prennent autant de place que d’autres nombres : parameter.grad = None les libère.",
            )
        )
    most, room = max(one.most for one in seen), max(map(_largest_layer, SEEDS))
    if most > room:
        total = len(right[0])
        raise Wrong(
            say(
                en=f"The weights are right, but {most} of {total} numbers of gradients are there at once, more than "
                f"the largest layer has ({room}): free each gradient as soon as its parameter is updated.",
                fr=f"Les poids sont justes, mais {most} nombres de gradient sur {total} sont présents en même temps, "
                f"plus que n’en a la plus grande couche ({room}) : libérez chaque gradient dès que son paramètre est "
                "mis à jour.",
            )
        )


def _named(seen: Sequence[_Seen]) -> Said:
    if all(same(one.weights, one.begun) for one in seen):
        return Said(
            "No weight has moved: register a hook for every parameter, and call the optimizer's step in it.",
            "Aucun poids n’a bougé : enregistrez un hook par paramètre, et appelez-y le step de l’optimiseur.",
        )
    for mistake in _MISTAKES:
        others = [_Seen(mistake.way, seed) for seed in SEEDS]
        if all(same(one.weights, other.weights) for one, other in zip(seen, others, strict=True)):
            return mistake.says
    return Said(
        "The weights differ from those of a plain training (zero_grad, backward, step): each parameter must be updated "
        "once per backward pass, by its own gradient, with moments that are kept.",
        "Les poids diffèrent de ceux d’un entraînement ordinaire (zero_grad, backward, step) : chaque paramètre doit "
        "être mis à jour une fois par passe arrière, par son propre gradient, avec des moments conservés.",
    )


def _never_freed(model: nn.Module, make_optimizer: MakeOptimizer) -> None:
    for parameter in model.parameters():
        optimizer = make_optimizer([parameter])
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())


def _anew(model: nn.Module, make_optimizer: MakeOptimizer) -> None:
    def update(parameter: Tensor) -> None:
        make_optimizer([parameter]).step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)


def _last_only(model: nn.Module, make_optimizer: MakeOptimizer) -> None:
    last = [make_optimizer([parameter]) for parameter in model.parameters()][-1]

    def update(parameter: Tensor) -> None:
        last.step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)


def _too_early(model: nn.Module, make_optimizer: MakeOptimizer) -> None:
    for parameter in model.parameters():
        optimizer = make_optimizer([parameter])

        def update(_: Tensor, parameter: Tensor = parameter, optimizer: Any = optimizer) -> None:
            optimizer.step()
            parameter.grad = None

        parameter.register_hook(update)


def _all_each_time(model: nn.Module, make_optimizer: MakeOptimizer) -> None:
    optimizer = make_optimizer(list(model.parameters()))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: optimizer.step())


_MISTAKES = (
    Mistake(
        _never_freed,
        Said(
            "The gradients are never freed: the next backward pass adds to them, and the second step is taken with a "
            "sum. parameter.grad = None at the end of the hook.",
            "Les gradients ne sont jamais libérés : la passe arrière suivante s’y ajoute, et le deuxième pas utilise "
            "une somme. Terminez le hook par parameter.grad = None.",
        ),
    ),
    Mistake(
        _anew,
        Said(
            "The optimizer is made anew in every hook, and its moments start from zero each time: make it once, when "
            "the hook is registered.",
            "L’optimiseur est recréé à chaque hook, et ses moments repartent de zéro : créez-le une seule fois, au "
            "moment où le hook est enregistré.",
        ),
    ),
    Mistake(
        _last_only,
        Said(
            "Only the last parameter moves: a function made in a loop sees the variable's last value. Give it its "
            "optimizer as a default argument (optimizer=optimizer).",
            "Seul le dernier paramètre bouge : une fonction créée dans une boucle voit la dernière valeur de la "
            "variable. Donnez-lui son optimiseur comme argument par défaut (optimizer=optimizer).",
        ),
    ),
    Mistake(
        _too_early,
        Said(
            "You update one step late: register_hook is called before the gradient is in parameter.grad. Use "
            "register_post_accumulate_grad_hook.",
            "Vous mettez à jour avec un pas de retard : register_hook est appelé avant que le gradient soit dans "
            "parameter.grad. Prenez register_post_accumulate_grad_hook.",
        ),
    ),
    Mistake(
        _all_each_time,
        Said(
            "Every hook updates all parameters that have a gradient, so most are updated several times: one optimizer "
            "per parameter.",
            "Chaque hook met à jour tous les paramètres qui ont un gradient, la plupart plusieurs fois : un optimiseur "
            "par paramètre.",
        ),
    ),
)

UPDATE_IN_BACKWARD = Exercise(
    id="update-in-backward",
    title=Said("the optimizer in the backward pass", "l’optimiseur dans la passe arrière"),
    judge=_judge,
    praise=Said(
        "Right: the same weights, and never more gradients than one layer has.",
        "Exact : les mêmes poids, et jamais plus de gradients que n’en a une couche.",
    ),
    hints=(
        Said(
            "One optimizer per parameter, made once. In the hook: its step, then the gradient freed.",
            "Un optimiseur par paramètre, créé une fois. Dans le hook : son step, puis le gradient libéré.",
        ),
        Said(
            "def update(parameter, optimizer=optimizer): optimizer.step(); parameter.grad = None — registered by "
            "parameter.register_post_accumulate_grad_hook(update), in the loop.",
            "def update(parameter, optimizer=optimizer): optimizer.step(); parameter.grad = None — enregistré par "
            "parameter.register_post_accumulate_grad_hook(update), dans la boucle.",
        ),
    ),
)
