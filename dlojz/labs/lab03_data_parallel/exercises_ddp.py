"""Exercises of lab 03 on DDP: averaging gradients, accumulation, buckets, communication during backward.

True gradients are those of one process on the data of all ranks. Whether communication overlaps is read from the order
of events (sent, waited for, backward ended), never from a duration: in the trial, an asynchronous all-reduce puts its
sum into the tensor at `wait()` and not before, so that an answer that does not wait is wrong every time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dlojz.base.language import a_or_an, shortest
from dlojz.labs.kit.exercise import Said
from dlojz.labs.kit.exercise_texts import MistakeWay, Texts
from dlojz.labs.kit.judges import reader
from dlojz.processes.forks import RankAnswer

TEXTS = Texts(__file__)

SAMPLES, WIDTH, CLASSES = 4, 6, 3
MICRO_BATCHES = 3

Batch = tuple[Tensor, Tensor]


def make_model(seed: int) -> nn.Module:
    """Two linear layers, the same on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))


def batch_of(rank: int, seed: int, number: int = 0) -> Batch:
    """A rank's micro-batch: inputs of some size, so that gradients are of order one, and classes."""
    generator = torch.Generator().manual_seed(10_000 * seed + 100 * rank + number)
    inputs = 5 * torch.randn((SAMPLES, WIDTH), generator=generator)
    return inputs, torch.randint(CLASSES, (SAMPLES,), generator=generator)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy over a batch."""
    return F.cross_entropy(model(batch[0]), batch[1])


def gradients(model: nn.Module) -> dict[str, Any]:
    """The gradients that a model holds, by the names under which they are judged."""
    return {
        f"gradient of {name}": None if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
    }


def true_gradients(seed: int, batches: list[Batch]) -> dict[str, Tensor]:
    """Gradients of the mean loss over batches of equal size, on one process."""
    model = make_model(seed)
    torch.stack([loss_of(model, batch) for batch in batches]).mean().backward()
    return gradients(model)


_WEIGHTS = "weights"


def average_gradients(model: nn.Module) -> None:
    """Replace every gradient by its mean over the ranks.

    Source: Li et al. 2020 (arXiv 2006.15704), §3.1: averaged gradients keep replicas equal, not averaged weights.
    """
    for parameter in model.parameters():
        if parameter.grad is not None:
            # Who: all ranks. What: one gradient, of its parameter's shape, summed. How much: its bytes.
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def _backward_trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> tuple[Any, dict[str, Any]]:
    from torch.nn.utils import parameters_to_vector

    model = make_model(seed)
    loss_of(model, batch_of(rank, seed)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank)  # replicas have equal weights; here they differ, to see that nobody averages them
    original_gradients = [parameter.grad for parameter in model.parameters()]
    answer(model)
    # Identity, not equality: a bucket, or the optimizer, holds the tensor itself.
    in_place = all(
        parameter.grad is original for parameter, original in zip(model.parameters(), original_gradients, strict=True)
    )
    return {"in place": in_place}, {**gradients(model), _WEIGHTS: parameters_to_vector(model.parameters()).detach()}


def _refuse_other_tensors(answers: list[RankAnswer], size: int) -> None:
    if not all(answer.value["in place"] for answer in answers):
        raise TEXTS.wrong("average-gradients", "each is a new tensor")


def _weights_of(rank: int, seed: int) -> Tensor:
    from torch.nn.utils import parameters_to_vector

    return parameters_to_vector(make_model(seed).parameters()).detach() + rank


def _mean_gradients(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    return {**true_gradients(seed, [batch_of(peer, seed) for peer in range(size)]), _WEIGHTS: _weights_of(rank, seed)}


AVERAGE_GRADIENTS = TEXTS.exercise(
    "average-gradients",
    _mean_gradients,
    on_ranks=True,
    trial=_backward_trial,
    local=lambda rank, size, seed: true_gradients(seed, [batch_of(rank, seed)]),
    inspect=_refuse_other_tensors,
    labels={_WEIGHTS: Said("the weights of a rank", "les poids d’un rang")},
    source=(average_gradients,),
)


def _micro_batches(rank: int, seed: int) -> list[Batch]:
    return [batch_of(rank, seed, number) for number in range(MICRO_BATCHES)]


def _accumulate(model: nn.Module, batches: Sequence[Batch]) -> None:
    for batch in batches:
        (loss_of(model, batch) / len(batches)).backward()
    average_gradients(model)


def _accumulation_trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> tuple[Any, dict[str, Any]]:
    """The gradients; and, in order, the samples that each forward pass reads, or 0 for a backward pass."""
    model, passes = make_model(seed), []

    def forward(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        if torch.is_grad_enabled():
            passes.append(len(inputs[0]))
            # On the output, not on a parameter: torch.autograd.grad accumulates nothing.
            output.register_hook(lambda gradient: passes.append(0))

    model.register_forward_hook(forward)
    answer(model, _micro_batches(rank, seed))
    return {"passes": passes}, gradients(model)


def _of_all(seed: int, ranks: Iterable[int]) -> dict[str, Tensor]:
    return true_gradients(seed, [batch for rank in ranks for batch in _micro_batches(rank, seed)])


def _inspect_accumulation(answers: list[RankAnswer], size: int) -> None:
    """The gradients are right; did each micro-batch have its backward pass, and did they travel once?"""
    passes: list[int] = answers[0].value["passes"]
    if max(passes, default=0) > SAMPLES:
        raise TEXTS.wrong(
            "accumulation", "one forward pass reads several micro-batches", most=max(passes), SAMPLES=SAMPLES
        )
    if any(samples and next_samples for samples, next_samples in pairwise(passes)):
        raise TEXTS.wrong("accumulation", "a forward pass begins before the backward pass")
    _inspect_traffic(answers)


def _inspect_traffic(answers: list[RankAnswer]) -> None:
    """Refuse gradients that are communicated more than once."""
    total = sum(parameter.numel() for parameter in make_model(0).parameters())
    for answer in answers:
        numel = sum(call["numel"] for call in answer.calls if call["op"] == "all_reduce")
        if numel > total:
            times = numel / total
            raise TEXTS.wrong(
                "accumulation",
                "gradients are communicated several times",
                times=shortest(times),
                numel=numel,
                total=total,
            )


ACCUMULATION = TEXTS.exercise(
    "accumulation",
    lambda rank, size, seed: _of_all(seed, range(size)),
    on_ranks=True,
    trial=_accumulation_trial,
    local=lambda rank, size, seed: _of_all(seed, [rank]),
    source=(_accumulate,),
    inspect=_inspect_accumulation,
)


Buckets = list[list[int]]


def fill_buckets(gradient_bytes: Sequence[int], limit_bytes: int) -> Buckets:
    """Parameters by bucket, in the order in which the buckets leave; a bucket is closed once it holds the limit.

    Source: Li et al. 2020, "PyTorch Distributed" (arXiv 2006.15704), §3.2.3 and §4.2: the reverse of
    `model.parameters()`; torch's `compute_bucket_assignment_by_size` closes a bucket when it reaches the limit.
    """
    buckets: Buckets = []
    filling: list[int] = []
    for index in reversed(range(len(gradient_bytes))):
        filling.append(index)
        if sum(gradient_bytes[member] for member in filling) >= limit_bytes:
            buckets.append(filling)
            filling = []
    return [*buckets, filling] if filling else buckets


def _never_beyond(sizes: Sequence[int], limit: int) -> Buckets:
    """Closes a bucket before it would exceed the limit, as DeepSpeed does."""
    buckets: Buckets = []
    filling: list[int] = []
    for index in reversed(range(len(sizes))):
        if filling and sum(sizes[member] for member in filling) + sizes[index] > limit:
            buckets.append(filling)
            filling = []
        filling.append(index)
    return [*buckets, filling] if filling else buckets


_read_buckets = reader(
    lambda value: [[operator.index(index) for index in bucket] for bucket in value],
    TEXTS.sentence("buckets", "a list of buckets"),
)


def _refuse_empty_bucket(answer: Callable[..., Any]) -> None:
    buckets = _read_buckets(answer([10, 10], 10))
    if buckets != [[1], [0]]:
        raise TEXTS.wrong("buckets", "an empty bucket where two gradients fill one each", buckets=buckets)


_RETURNED = "[*buckets, filling] if filling else buckets"


def _changed(text: str) -> str:
    """The right buckets, with something else in place of each `index`."""
    return f"{_RETURNED} → [[{text} for index in bucket] for bucket in (*buckets, filling) if bucket]"


BUCKETS = TEXTS.exercise(
    "buckets",
    fill_buckets,
    cases=(
        ([4, 40, 8, 12, 20, 6, 30, 2, 10], 30),
        ([100, 10, 10, 10, 10, 90, 5, 5, 10, 15], 20),
        ([7, 5, 3, 8, 1, 4, 12], 12),
        ([50, 60, 70, 3], 50),
    ),
    mistakes={
        "you fill forwards and reverse the list of buckets": f"reversed →; {_RETURNED} → ({_RETURNED})[::-1]",
        "the list of buckets is turned round": f"{_RETURNED} → ({_RETURNED})[::-1]",
        "within a bucket too the gradients become ready in reverse": (
            f"{_RETURNED} → [sorted(bucket) for bucket in (*buckets, filling) if bucket]"
        ),
        "the last bucket, not quite full, never leaves": f"{_RETURNED} → buckets",
        "you close a bucket before it exceeds the limit": _never_beyond,
        "where the gradients fill the last bucket exactly": f"{_RETURNED} → [*buckets, filling]",
        "the last bucket is empty": f"{_RETURNED} → [*buckets, filling, []] if filling else [*buckets, []]",
        "you number the parameters from 1": _changed("index + 1"),
        "you number the parameters from the end": _changed("len(gradient_bytes) - 1 - index"),
        "you return sizes": _changed("gradient_bytes[index]"),
    },
    read=_read_buckets,
    told=Said("For gradients of {0} bytes and a limit of {1}", "Pour des gradients de {0} octets et une limite de {1}"),
    then=_refuse_empty_bucket,
)


Synchronize = Callable[[], object]
SENT, SENT_AND_WAITED, WAITED, BACKWARD_ENDED = "sent", "sent and waited", "waited", "backward ended"
STEPS = 2


class _Travelling:
    """The work of an asynchronous all-reduce, which writes down when it is waited for."""

    def __init__(self, tensor: Tensor, sum_of_all: Tensor, work: Any, events: list[str]) -> None:
        self._tensor, self._sum, self._work, self._events = tensor, sum_of_all, work, events
        self._version = tensor._version

    def wait(self, *arguments: Any) -> bool:
        """Put the sum where it belongs; something else, each time, if the tensor was written to meanwhile."""
        self._events.append(WAITED)
        self._work.wait()
        written = self._tensor._version != self._version
        self._tensor.detach().copy_(self._sum + self._tensor if written else self._sum)
        self._version = self._tensor._version
        return True

    def is_completed(self) -> bool:
        """Whether the sum is there."""
        return bool(self._work.is_completed())

    def get_future(self) -> _Travelling:
        """Itself: torch's future, too, has `wait`."""
        return self


class _Noted:
    """The work of another collective, which writes down when it is waited for."""

    def __init__(self, work: Any, events: list[str]) -> None:
        self._work, self._events = work, events

    def wait(self, *arguments: Any) -> Any:
        """Wait for it, and note that."""
        self._events.append(WAITED)
        return self._work.wait(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


OTHER_COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "reduce", "gather", "broadcast",
    "all_to_all", "all_to_all_single",
)  # fmt: skip
"""They may take the place of an all-reduce."""


def _watch(events: list[str]) -> None:
    """From here on every collective of this process, which ends with the trial, leaves an event."""
    original = dist.all_reduce

    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if not async_op:
            events.append(SENT_AND_WAITED)
            return original(tensor, op=op, group=group)
        events.append(SENT)
        sum_of_all = tensor.detach().clone()
        return _Travelling(tensor, sum_of_all, original(sum_of_all, op=op, group=group, async_op=True), events)

    def noted(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            work = collective(*arguments, **options)
            events.append(SENT_AND_WAITED if work is None else SENT)
            return work and _Noted(work, events)

        return call

    dist.all_reduce = all_reduce
    for name in OTHER_COLLECTIVES:
        setattr(dist, name, noted(getattr(dist, name)))


def _trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> tuple[Any, dict[str, Any]]:
    """Two steps, as the hooks must serve for all of them; the gradients judged are those of the last."""
    events: list[str] = []
    _watch(events)
    model = make_model(seed)
    synchronize = answer(model)
    if not callable(synchronize):
        return {"returned": type(synchronize).__name__}, _mean(rank, size, seed)  # for `_inspect` to refuse
    for step in range(STEPS):
        model.zero_grad()
        events.clear()
        loss_of(model, batch_of(rank, seed, step)).backward()
        events.append(BACKWARD_ENDED)
        synchronize()
    return {"events": events}, gradients(model)


def _mean(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    return true_gradients(seed, [batch_of(peer, seed, STEPS - 1) for peer in range(size)])


def overlap(model: nn.Module) -> Synchronize:
    """Send each gradient as soon as backward has finished with it; the function returned waits for all of them.

    Source: Li et al. 2020 (arXiv 2006.15704), §3.2.3.
    """
    travelling: list[tuple[Any, Tensor]] = []

    def send(parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        gradient /= dist.get_world_size()
        # Who: all ranks. What: one gradient, of its parameter's shape, summed; the call returns at once.
        travelling.append((dist.all_reduce(gradient, async_op=True), parameter))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(send)

    def synchronize() -> None:
        for work, _ in travelling:
            work.wait()
        travelling.clear()

    return synchronize


def _inspect(answers: list[RankAnswer], size: int) -> None:
    """The gradients are right; did they travel during backward, and without stopping it?"""
    returned = answers[0].value.get("returned")
    if returned:
        raise TEXTS.wrong("overlap", "synchronize is not returned", a_returned=a_or_an(returned), returned=returned)
    events: list[str] = answers[0].value["events"]
    during = events[: events.index(BACKWARD_ENDED)]
    if SENT_AND_WAITED in during:
        raise TEXTS.wrong("overlap", "each hook waits for its all-reduce")
    if WAITED in during:
        raise TEXTS.wrong("overlap", "wait() is called in the hook")
    if SENT not in during:
        raise TEXTS.wrong("overlap", "none leaves before backward has ended")


OVERLAP = TEXTS.exercise(
    "overlap",
    _mean,
    on_ranks=True,
    trial=_trial,
    local=lambda rank, size, seed: true_gradients(seed, [batch_of(rank, seed, STEPS - 1)]),
    source=(overlap,),
    mistakes={
        "synchronize() does not wait": MistakeWay(
            "work.wait() → pass", seen=lambda ranks: not any(WAITED in rank["events"] for rank in ranks)
        ),
        "what travels is not parameter.grad": MistakeWay(
            "work.wait() → pass",
            seen=lambda ranks: all(rank["events"].count(WAITED) >= rank["events"].count(SENT) > 0 for rank in ranks),
        ),
    },
    inspect=_inspect,
)
