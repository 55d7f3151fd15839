"""Exercises of lab 09 on updates: when to freeze the variance, fused kernels, update in backward, DiLoCo's outer step.

Bytes per parameter are counted, not measured. An update in backward must give the weights of a plain training, and hold
few gradients at once. DiLoCo's ranks are compared with one process, round after round.

Source: Douillard et al. 2023, "DiLoCo" (arXiv 2311.08105), algorithm 1; the outer optimizer is torch's SGD with
Nesterov momentum.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dlojz.base.language import say
from dlojz.labs.kit.exercise import Said
from dlojz.labs.kit.exercise_texts import Texts, by_part
from dlojz.labs.kit.judges import normal
from dlojz.labs.kit.rank_judges import TENSOR_CASES, asked_for, gathers
from dlojz.processes.forks import RankAnswer

TEXTS = Texts(__file__)

Operation = tuple[Sequence[str], Sequence[str]]
"""Names of the tensors that it reads, and of those that it writes."""
BYTES = 4

ADAM: tuple[Operation, ...] = (
    (("m", "g"), ("m",)),
    (("v",), ("v",)),
    (("v", "g", "g"), ("v",)),
    (("v",), ("t",)),
    (("t",), ("t",)),
    (("t",), ("t",)),
    (("p", "m", "t"), ("p",)),
)
"""`m.lerp_(g, …)`, `v.mul_(…)`, `v.addcmul_(g, g, …)`, `t = v.sqrt()`, `t.div_(…)`, `t.add_(eps)`,
`p.addcdiv_(m, t, …)`: as torch's Adam for one tensor."""
ADAM_STATES = ("p", "g", "m", "v")


def update_traffic(operations: Sequence[Operation], states: Collection[str]) -> tuple[int, int]:
    """Count the bytes per parameter that an update moves between memory and the processor, in fp32.

    Args:
        operations: in order.
        states: tensors that are there before and after; all others are temporary.

    Returns:
        one kernel per operation; one kernel for all, which reads and writes each state at most once.

    Source: Jiang et al. 2021, "Optimizer Fusion" (arXiv 2104.00237), for locality as what fusion gains; the count is
    ours.
    """
    tensor_moves = sum(len(set(reads)) + len(set(writes)) for reads, writes in operations)
    read_states: set[str] = set()
    written_states: set[str] = set()
    for reads, writes in operations:
        # written before in the same kernel: the number is still in a register
        read_states |= {name for name in reads if name in states} - written_states
        written_states |= {name for name in writes if name in states}
    return BYTES * tensor_moves, BYTES * (len(read_states) + len(written_states))


def _kernel_cases() -> Iterator[tuple[Sequence[Operation], Collection[str]]]:
    yield list(ADAM), set(ADAM_STATES)
    yield [(("b", "g"), ("b",)), (("p", "b"), ("p",))], set("pgb")  # momentum
    # The update itself is kept: written first, read afterwards, never needed from before.
    yield [(("g", "m"), ("u",)), (("u", "u"), ("s",)), (("s", "u"), ("m",)), (("p", "m", "u"), ("p",))], set("pgmu")
    # A state that is only written: the size of the step, kept for a figure.
    yield [(("p", "g"), ("p",)), (("g",), ("s",))], set("pgs")


def _kernel_told(case: tuple[Sequence[Operation], Collection[str]]) -> str:
    operations_text = "; ".join(f"{' '.join(reads)} → {' '.join(writes)}" for reads, writes in case[0])
    return say(en=f"For the operations {operations_text}", fr=f"Pour les opérations {operations_text}")


def _apart(operations: Sequence[Operation], states: Collection[str]) -> int:
    return update_traffic(operations, states)[0]


def _all_names(operations: Sequence[Operation], states: Collection[str]) -> int:
    everything = {name for reads, writes in operations for name in (*reads, *writes)}
    return update_traffic(operations, everything)[1]


def _names(operations: Sequence[Operation], states: Collection[str], side: int) -> int:
    return BYTES * len({name for operation in operations for name in operation[side] if name in states})


FUSED_TRAFFIC = TEXTS.exercise(
    "fused-traffic",
    update_traffic,
    cases=_kernel_cases,
    told=_kernel_told,
    parts=(
        Said("one kernel per operation", "un noyau par opération"),
        Said("one kernel for all", "un seul noyau pour toutes"),
    ),
    mistakes={
        "the two results are swapped": lambda operations, states: update_traffic(operations, states)[::-1],
        "you count tensors": by_part(
            lambda operations, states: [count // BYTES for count in update_traffic(operations, states)], 2
        ),
        "a tensor named twice by one operation": by_part(
            lambda operations, states: (
                BYTES * sum(len(reads) + len(writes) for reads, writes in operations),
                update_traffic(operations, states)[1],
            ),
            2,
        ),
        "fused temporary tensors in memory": by_part(
            lambda operations, states: (_apart(operations, states), _all_names(operations, states)), 2
        ),
        "a state that is written before it is read": by_part(
            lambda operations, states: (
                _apart(operations, states),
                _names(operations, states, 0) + _names(operations, states, 1),
            ),
            2,
        ),
        "each state once": by_part(lambda operations, states: (_apart(operations, states), BYTES * len(states)), 2),
        "each state twice": by_part(
            lambda operations, states: (_apart(operations, states), 2 * BYTES * len(states)), 2
        ),
        "other bytes per number": [
            TEXTS.mistake("fused-traffic", "other bytes per number", mistake.way, mistake.part, size=size)
            for size in (2, 8)
            for mistake in by_part(
                lambda operations, states, size=size: [
                    count * size // BYTES for count in update_traffic(operations, states)
                ],
                2,
            )
        ],
        **{
            key: by_part(
                lambda operations, states, count=count: (
                    BYTES * sum(count(set(reads), set(writes)) for reads, writes in operations),
                    update_traffic(operations, states)[1],
                ),
                2,
            )
            for key, count in {
                "a tensor that an operation reads and writes goes both ways": lambda reads, writes: len(reads | writes),
                "you count what is read only": lambda reads, writes: len(reads),
                "you count what is written only": lambda reads, writes: len(writes),
                "you count two tensors for every operation": lambda reads, writes: 2,
            }.items()
        },
        "each name once, temporaries included": by_part(
            lambda operations, states: (
                _apart(operations, states),
                BYTES * len({name for reads, writes in operations for name in (*reads, *writes)}),
            ),
            2,
        ),
        "one way only in one kernel": [
            mistake
            for side in (0, 1)
            for mistake in by_part(
                lambda operations, states, side=side: (
                    _apart(operations, states),
                    _names(operations, states, side),
                ),
                2,
            )
        ],
        "both results are those of one kernel per operation": by_part(
            lambda operations, states: (_apart(operations, states),) * 2, 2
        ),
        "Adam's traffic whatever the operations": by_part(
            lambda operations, states: update_traffic(ADAM, ADAM_STATES), 2
        ),
    },
)


MakeOptimizer = Callable[[Sequence[Any]], Any]
STEPS, SEEDS = 3, (1, 2)


def update_in_backward(model: nn.Module, make_optimizer: MakeOptimizer) -> None:
    """Update each parameter as soon as its gradient is there, and free the gradient.

    Source: Jiang et al. 2021, "Optimizer Fusion" (arXiv 2104.00237), backward-fusion.
    """
    for parameter in model.parameters():
        optimizer = make_optimizer([parameter])

        # the default binds the optimizer of this pass of the loop
        def update(parameter: Tensor, optimizer: Any = optimizer) -> None:
            optimizer.step()
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(update)


def _model(seed: int) -> nn.Module:
    # the random numbers of the notebook go on as if nothing had been drawn
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 3))


def _adam(tensors: Sequence[Any]) -> Any:
    return torch.optim.Adam(tensors, lr=0.05)


def _loss(model: nn.Module, seed: int, step: int) -> Tensor:
    return (model(normal(100 * seed + step, 8, 6)) - normal(100 * seed + step + 50, 8, 3)).square().sum()


def _weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _trained(answer: Callable[..., Any], seed: int) -> tuple[nn.Module, int]:
    """A model trained with an answer in its backward passes, and the most numbers of gradients held at once."""
    model = _model(seed)
    parameters, peak_numel = list(model.parameters()), 0

    def look(_: Tensor) -> None:
        nonlocal peak_numel
        peak_numel = max(peak_numel, sum(parameter.numel() for parameter in parameters if parameter.grad is not None))

    for parameter in parameters:  # before the answer's own: hooks are called in the order in which they came
        parameter.register_post_accumulate_grad_hook(look)
    owned: list[Any] = []

    def make_optimizer(tensors: Sequence[Any]) -> Any:
        tensors = list(tensors)
        owned.extend(tensors)
        return _adam(tensors)

    before = _weights(model)
    answer(model, make_optimizer)
    for step in range(STEPS):
        _loss(model, seed, step).backward()
    # `is`: == would compare the numbers of two tensors
    without = sum(all(parameter is not tensor for tensor in owned) for parameter in parameters)
    if without and not bool((_weights(model) == before).all()):
        raise TEXTS.wrong(
            "update-in-backward", "parameters without an optimizer", without=without, parameters_count=len(parameters)
        )
    return model, peak_numel


def _frugal(answer: Callable[..., Any]) -> None:
    """The weights are right: are gradients freed, and early enough?"""
    trained = [_trained(answer, seed) for seed in SEEDS]
    if any(parameter.grad is not None for model, _ in trained for parameter in model.parameters()):
        raise TEXTS.wrong("update-in-backward", "gradients after the backward pass")
    model, peak_numel = max(trained, key=lambda pair: pair[1])
    # weight and bias of one layer may be there together
    room = max(sum(parameter.numel() for parameter in layer.parameters()) for layer in model.children())
    if peak_numel > room:
        total = sum(parameter.numel() for parameter in model.parameters())
        raise TEXTS.wrong(
            "update-in-backward", "too many gradients at once", peak_numel=peak_numel, total=total, room=room
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
    last_optimizer = [make_optimizer([parameter]) for parameter in model.parameters()][-1]

    def update(parameter: Tensor) -> None:
        last_optimizer.step()
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


def _twice(model: nn.Module, make_optimizer: MakeOptimizer) -> None:
    def update(parameter: Tensor, optimizer: Any) -> None:
        optimizer.step()
        optimizer.step()
        parameter.grad = None

    for parameter in model.parameters():
        optimizer = make_optimizer([parameter])
        parameter.register_post_accumulate_grad_hook(partial(update, optimizer=optimizer))


def _all_each_time(model: nn.Module, make_optimizer: MakeOptimizer) -> None:
    optimizer = make_optimizer(list(model.parameters()))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: optimizer.step())


UPDATE_IN_BACKWARD = TEXTS.exercise(
    "update-in-backward",
    update_in_backward,
    cases=[(seed,) for seed in SEEDS],
    trial=lambda answer, seed: _weights(_trained(answer, seed)[0]),
    mistakes={
        "no weight has moved": lambda model, make_optimizer: None,
        "gradients are never freed": _never_freed,
        "the optimizer is made anew in every hook": _anew,
        "only the last parameter moves": _last_only,
        "you update one step late": _too_early,
        "every hook updates all parameters that have a gradient": _all_each_time,
        "every parameter is updated twice per backward pass": _twice,
    },
    differs=lambda *_: TEXTS.sentence("update-in-backward", "other weights than of a plain training"),
    then=_frugal,
)


NUMEL, ROUNDS = 20, 3
RATE, MOMENTUM = 0.7, 0.9
_ANCHOR, _MOMENTUM = "anchor", "momentum"


def local_steps(rank: int, seed: int, number: int) -> Tensor:
    """Make the change of a rank's weights in one round of local steps, shape (NUMEL,)."""
    return normal(1000 * seed + 10 * rank + number, NUMEL) + 0.5


def _trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> tuple[Any, dict[str, Any]]:
    anchor = normal(seed, NUMEL)
    weights, momentum = anchor.clone(), torch.zeros(NUMEL)
    outputs: dict[str, Any] = {}
    for number in range(ROUNDS):
        weights += local_steps(rank, seed, number)
        answer(weights, anchor, momentum, RATE, MOMENTUM)
        outputs[f"weights of round {number}"] = weights.clone()
    return {}, outputs | {_ANCHOR: anchor, _MOMENTUM: momentum}


def simulated(  # noqa: PLR0913 - each is one way to go wrong
    size: int,
    seed: int,
    *,
    sign: float = 1.0,
    add: bool = False,
    alone: bool = False,
    nesterov: bool = True,
    keep: bool = True,
    bring: bool = True,
    bring_mean: bool = False,
    move_anchor: bool = True,
    average: bool = False,
    rule: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    of_sum: bool = False,
) -> list[dict[str, Tensor]]:
    """Compute in one process what each rank holds after all rounds.

    Args:
        sign: of the outer gradient.
        add: whether the ranks' differences are added up rather than averaged.
        alone: whether each rank takes its own difference for all ranks'.
        nesterov: whether the step looks ahead.
        keep: whether the momentum is kept.
        bring: whether the new weights are written into `weights`.
        bring_mean: whether the mean of the weights is written there in their place.
        move_anchor: whether the new weights are written into `anchor`.
        average: whether the weights are averaged, and nothing else.
        rule: another momentum, and another step, from the gradient and the momentum before.
        of_sum: whether the sum of the weights stands in place of their mean.
    """
    anchors = [normal(seed, NUMEL) for _ in range(size)]
    weights = [anchor.clone() for anchor in anchors]
    momenta = [torch.zeros(NUMEL) for _ in range(size)]
    rank_tensors: list[dict[str, Tensor]] = [{} for _ in range(size)]
    for number in range(ROUNDS):
        for rank in range(size):
            weights[rank] = weights[rank] + local_steps(rank, seed, number)
        # (size, NUMEL): outer gradients, against the way that each rank has gone
        gaps = torch.stack([anchor - rank_weights for anchor, rank_weights in zip(anchors, weights, strict=True)])
        anchors_before = list(anchors)
        mean = gaps.sum(0) if add else gaps.mean(0)
        mean = anchors[0] - torch.stack(weights).sum(0) if of_sum else mean
        for rank in range(size):
            gradient = sign * (gaps[rank] if alone else mean)
            # Nesterov as in torch: u ← μ u + Δ, step Δ + μ u
            momentum = MOMENTUM * momenta[rank] + gradient
            step = gradient + MOMENTUM * momentum if nesterov else momentum
            momentum, step = rule(gradient, momenta[rank]) if rule else (momentum, step)
            new = anchors[rank] - (mean if average else RATE * step)
            if keep and not average:
                momenta[rank] = momentum
            if move_anchor:
                anchors[rank] = new
            if bring:
                weights[rank] = anchors_before[rank] - mean if bring_mean else new.clone()
            rank_tensors[rank][f"weights of round {number}"] = weights[rank]
    for rank in range(size):
        rank_tensors[rank] |= {_ANCHOR: anchors[rank], _MOMENTUM: momenta[rank]}
    return rank_tensors


def _values(**options: Any) -> Callable[[int, int, int], dict[str, Tensor]]:
    return lambda rank, size, seed: simulated(size, seed, **options)[rank]


def _inspect(answers: list[RankAnswer], size: int) -> None:
    """All values are right: has more been sent than the weights, once per round?"""
    if gathers(answers[0]):
        raise TEXTS.wrong("outer-step", "weights brought together to be added")
    if sum(asked_for(answers[0], "all_reduce")) > ROUNDS * NUMEL:
        raise TEXTS.wrong("outer-step", "more is sent than the weights")


OUTER_STEP = TEXTS.exercise(
    "outer-step",
    _values(),
    on_ranks=True,
    cases=TENSOR_CASES,
    trial=_trial,
    labels={
        **{
            f"weights of round {number}": Said(f"weights (round {number + 1})", f"weights (tour {number + 1})")
            for number in range(ROUNDS)
        },
        _ANCHOR: Said("anchor", "anchor"),
        _MOMENTUM: Said("momentum", "momentum"),
    },
    inspect=_inspect,
    faults={
        "every rank uses its own difference": _values(alone=True),
        "you walk back": _values(sign=-1.0),
        "the differences are added up over the ranks": _values(add=True),
        "plain momentum in place of Nesterov's": _values(nesterov=False),
        "the momentum is not kept": _values(keep=False),
        "anchor and momentum stay as they were": _values(keep=False, move_anchor=False),
        "weights hold the mean of the ranks' weights": _values(bring_mean=True),
        "the weights do not move to the anchor": _values(bring=False),
        "the anchor stays at the start": _values(move_anchor=False),
        "averages the weights, as Local SGD does": _values(average=True),
        "sum of the weights in place of their mean": _values(of_sum=True),
        "nothing is written in place": _values(bring=False, move_anchor=False, keep=False),
        **{
            key: _values(rule=rule)
            for key, rule in {
                "the momentum does not decay": lambda gradient, u: (u + gradient, gradient + MOMENTUM * (u + gradient)),
                "you weigh the gradient by 1 − μ, as Adam does": lambda gradient, u: (
                    MOMENTUM * u + (1 - MOMENTUM) * gradient,
                    gradient + MOMENTUM * (MOMENTUM * u + (1 - MOMENTUM) * gradient),
                ),
                "the momentum does not move the anchor": lambda gradient, u: (MOMENTUM * u + gradient, gradient),
                "the rate is left out": lambda gradient, u: (
                    MOMENTUM * u + gradient,
                    (gradient + MOMENTUM * (MOMENTUM * u + gradient)) / RATE,
                ),
                "the momentum counts in full in the step": lambda gradient, u: (
                    MOMENTUM * u + gradient,
                    gradient + MOMENTUM * u + gradient,
                ),
                "the step takes the momentum from before its update": lambda gradient, u: (
                    MOMENTUM * u + gradient,
                    gradient + MOMENTUM * u,
                ),
            }.items()
        },
    },
)


Attach = Callable[[nn.Module], Any]


def watch_gradients(
    model: nn.Module, loss_of: Callable[[nn.Module], Tensor], attach: Attach | None = None
) -> list[int]:
    """Count the bytes of gradients held after each one has arrived in a backward pass, and at its end.

    Args:
        model: without gradients yet.
        loss_of: makes one forward pass and gives the loss.
        attach: called with the model before the pass: here an optimizer may put itself into it.

    Returns:
        one number for each parameter, in the order in which backward gives their gradients, and one for the end.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradient_bytes: list[int] = []

    def look(_: Tensor) -> None:
        gradient_bytes.append(sum(parameter.grad.nbytes for parameter in parameters if parameter.grad is not None))

    for parameter in parameters:  # before `attach`: hooks are called in the order in which they came
        parameter.register_post_accumulate_grad_hook(look)
    if attach is not None:
        attach(model)
    loss_of(model).backward()
    look(parameters[0])
    return gradient_bytes
