"""Exercises of lab 09 on updates: when to freeze the variance, fused kernels, update in backward, DiLoCo's outer step.

Bytes per parameter are counted, not measured. An update in backward must give the weights of a plain training, and hold
few gradients at once. DiLoCo's ranks are compared with one process, round after round.

Source: Douillard et al. 2023, "DiLoCo" (arXiv 2311.08105), algorithm 1; the outer optimizer is torch's SGD with
Nesterov momentum.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dlojz.base.language import say
from dlojz.labs.kit.exercise import Said
from dlojz.labs.kit.exercise_texts import Texts, by_part, edited_when_called
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


_FUSED = "(len(read_states) + len(written_states))"

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
        "each state once": by_part(f"{_FUSED} → len(states)", 2),
        "each state twice": by_part(f"{_FUSED} → 2 * len(states)", 2),
        "other bytes per number": [
            TEXTS.mistake(
                "fused-traffic",
                "other bytes per number",
                edited_when_called((update_traffic,), f"BYTES * → {size} *", part),
                part,
                size=size,
            )
            for size in (2, 8)
            for part in (None, 0, 1)
        ],
        "each name once, temporaries included": by_part(
            f"{_FUSED} → len({{name for operation in operations for names in operation for name in names}})", 2
        ),
        "both results are those of one kernel per operation": by_part(f"{_FUSED} → tensor_moves", 2),
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
        "every hook updates all parameters that have a gradient": _all_each_time,
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


def simulated(size: int, seed: int) -> list[dict[str, Tensor]]:
    """Compute in one process what each rank holds after all rounds."""
    anchors = [normal(seed, NUMEL) for _ in range(size)]
    weights = [anchor.clone() for anchor in anchors]
    momenta = [torch.zeros(NUMEL) for _ in range(size)]
    rank_tensors: list[dict[str, Tensor]] = [{} for _ in range(size)]
    for number in range(ROUNDS):
        for rank in range(size):
            weights[rank] = weights[rank] + local_steps(rank, seed, number)
        # (size, NUMEL): outer gradients, against the way that each rank has gone
        gaps = torch.stack([anchor - rank_weights for anchor, rank_weights in zip(anchors, weights, strict=True)])
        mean = gaps.mean(0)
        for rank in range(size):
            gradient = mean
            # Nesterov as in torch: u ← μ u + Δ, step Δ + μ u
            momentum = MOMENTUM * momenta[rank] + gradient
            step = gradient + MOMENTUM * momentum
            new = anchors[rank] - RATE * step
            momenta[rank] = momentum
            weights[rank] = new.clone()
            anchors[rank] = new
            rank_tensors[rank][f"weights of round {number}"] = weights[rank]
    for rank in range(size):
        rank_tensors[rank] |= {_ANCHOR: anchors[rank], _MOMENTUM: momenta[rank]}
    return rank_tensors


def _values(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    return simulated(size, seed)[rank]


def _inspect(answers: list[RankAnswer], size: int) -> None:
    """All values are right: has more been sent than the weights, once per round?"""
    if gathers(answers[0]):
        raise TEXTS.wrong("outer-step", "weights brought together to be added")
    if sum(asked_for(answers[0], "all_reduce")) > ROUNDS * NUMEL:
        raise TEXTS.wrong("outer-step", "more is sent than the weights")


_NO_MOMENTUM = "momenta[rank] = momentum → pass"
_NO_ANCHOR = "anchors[rank] = new → pass"
_NO_WEIGHTS = "weights[rank] = new.clone() → pass"

OUTER_STEP = TEXTS.exercise(
    "outer-step",
    _values,
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
    source=(_values, simulated),
    faults={
        "every rank uses its own difference": "gradient = mean → gradient = gaps[rank]",
        "you walk back": "gradient = mean → gradient = -mean",
        "the differences are added up over the ranks": "gaps.mean(0) → gaps.sum(0)",
        "plain momentum in place of Nesterov's": "gradient + MOMENTUM * momentum → momentum",
        "the momentum is not kept": _NO_MOMENTUM,
        "anchor and momentum stay as they were": f"{_NO_MOMENTUM}; {_NO_ANCHOR}",
        "weights hold the mean of the ranks' weights": "new.clone() → anchors[rank] - mean",
        "the weights do not move to the anchor": _NO_WEIGHTS,
        "the anchor stays at the start": _NO_ANCHOR,
        "averages the weights, as Local SGD does": f"RATE * step → mean; {_NO_MOMENTUM}",
        "sum of the weights in place of their mean": "gaps.mean(0) → anchors[0] - torch.stack(weights).sum(0)",
        "nothing is written in place": f"{_NO_WEIGHTS}; {_NO_ANCHOR}; {_NO_MOMENTUM}",
        "the momentum does not decay": "MOMENTUM * momenta[rank] → momenta[rank]",
        "you weigh the gradient by 1 − μ, as Adam does": (
            "momenta[rank] + gradient → momenta[rank] + (1 - MOMENTUM) * gradient"
        ),
        "the momentum does not move the anchor": "gradient + MOMENTUM * momentum → gradient",
        "the rate is left out": "RATE * step → step",
        "the momentum counts in full in the step": "gradient + MOMENTUM * momentum → gradient + momentum",
        "the step takes the momentum from before its update": "MOMENTUM * momentum → MOMENTUM * momenta[rank]",
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
