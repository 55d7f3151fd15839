"""The bank of wrong answers of lab 09, on one process and on real ranks.

The answers are written the way a student would write them, not with the variants that the judges compare with.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dlojz.base.errors import LabError
from dlojz.labs import lab09_optimizers
from dlojz.labs.kit.exercise import Challenge, judge
from dlojz.labs.lab09_optimizers.exercises_compression import FEWER_BYTES, compress, compressed_bytes, read, write
from dlojz.labs.lab09_optimizers.exercises_updates import ADAM, ADAM_STATES, update_in_backward, update_traffic
from tests.labs import student_answers_optimizers as student
from tests.labs.bank import Answer, BankTests

EXERCISES = {one.id: one for one in lab09_optimizers.EXERCISES if not isinstance(one, Challenge)}


def signs(x: Any) -> Any:
    return 2.0 * (x >= 0) - 1


def scaled(x: Any) -> Any:
    return signs(x) * x.abs().sum() / len(x)


def bias_row_by_row(draws: Any) -> Any:
    total = torch.zeros_like(draws[0])
    for row in draws:
        total += scaled(row) - row
    return total / len(draws)


def fed(values: Any, error: Any, compress: Any) -> Any:
    meant = values + error
    told = compress(meant)
    return told, meant - told


def all_reduced(
    values: Any,
    worker_error: Any,
    server_error: Any,
    *,
    in_place: bool = True,
    worker: bool = True,
    server: bool = True,
    last_only: bool = False,
    average: bool = True,
    way_back: str = "bytes",
    way_there: str = "bytes",
) -> Any:
    size = dist.get_world_size()
    if in_place and not last_only:
        worker_error += values
    else:
        worker_error = worker_error + values
    chunks = worker_error.view(size, -1)
    told = torch.stack([write(chunk) for chunk in chunks])
    if worker and not last_only:
        chunks -= torch.stack([read(message) for message in told])
    if way_there == "bytes":
        received = torch.empty_like(told)
        dist.all_to_all_single(received, told)
        heard = torch.stack([read(message) for message in received])
    elif way_there == "gather":
        everybody = [torch.empty_like(told) for _ in range(size)]
        dist.all_gather(everybody, told)
        heard = torch.stack([read(one[dist.get_rank()]) for one in everybody])
    else:
        said = torch.stack([read(message) for message in told])
        heard = torch.empty_like(said)
        dist.all_to_all_single(heard, said)
    mean = heard.mean(0) if average else heard.sum(0)
    if in_place:
        server_error += mean
    else:
        server_error = server_error + mean
    if way_back == "floats":
        everything = torch.empty(size * len(server_error))
        dist.all_gather_into_tensor(everything, server_error.clone())
        server_error.zero_()
        return everything
    message = write(server_error)
    if server:
        server_error -= read(message)
    else:
        server_error.zero_()
    everything = torch.empty_like(told)
    dist.all_gather_into_tensor(everything, message[None])
    return torch.cat([read(one) for one in everything])


def forgetful_worker(values: Any, worker_error: Any, server_error: Any) -> Any:
    result = all_reduced(values, worker_error, server_error)
    worker_error.zero_()
    return result


def keeps_the_last_error_only(values: Any, worker_error: Any, server_error: Any) -> Any:
    meant = (values + worker_error).view(dist.get_world_size(), -1)
    told = torch.cat([read(write(chunk)) for chunk in meant])
    result = all_reduced(values, worker_error, server_error)
    worker_error.copy_(values - told)
    return result


def talks_to_itself(values: Any, worker_error: Any, server_error: Any) -> Any:
    worker_error += values
    told = torch.cat([read(write(chunk)) for chunk in worker_error.view(dist.get_world_size(), -1)])
    worker_error -= told
    return told


def way(**changes: Any) -> Answer:
    return lambda values, worker_error, server_error: all_reduced(values, worker_error, server_error, **changes)


def sent(n: int, ranks: int) -> float:
    share = (n + ranks - 1) // ranks
    share += -share % 8
    return 2 * (ranks - 1) * (share // 8 + 4 * ((share + 2047) // 2048))


def whole_message(n: int) -> int:
    return math.ceil(n / 8) + 4 * math.ceil(n / 2048)


def frozen(norms: Any, beta2: float, threshold: float) -> int:
    back = round(1 / (1 - beta2))
    for step in range(len(norms)):
        if step >= back:
            a, b = sorted((norms[step - back], norms[step]))
            if a / b >= threshold:
                return step
    return len(norms)


def frozen_by(test: Callable[[float, float, float], bool], back: int | None = None) -> Answer:
    def answer(norms: Any, beta2: float, threshold: float) -> int:
        delta = round(1 / (1 - beta2)) if back is None else back
        return next((t for t in range(delta, len(norms)) if test(norms[t - delta], norms[t], threshold)), len(norms))

    return answer


def traffic(operations: Any, states: Any) -> tuple[int, int]:
    apart = 0
    fresh: set[str] = set()
    needed: set[str] = set()
    changed: set[str] = set()
    for reads, writes in operations:
        apart += 4 * (len({*reads}) + len({*writes}))
        for name in reads:
            if name in states and name not in fresh:
                needed.add(name)
        fresh.update(writes)
        changed.update(name for name in writes if name in states)
    return apart, 4 * len(needed) + 4 * len(changed)


def hooks(*acts: Answer) -> Answer:
    """An optimizer for each parameter, with which `acts` are done in turn when its gradient is there."""

    def answer(model: Any, make_optimizer: Any) -> None:
        optimizers = {parameter: make_optimizer([parameter]) for parameter in model.parameters()}

        def hook(parameter: Any) -> None:
            for act in acts:
                act(optimizers[parameter], parameter)

        for parameter in optimizers:
            parameter.register_post_accumulate_grad_hook(hook)

    return answer


def stepped(optimizer: Any, parameter: Any) -> None:
    optimizer.step()


def one_optimizer_for_all(model: Any, make_optimizer: Any) -> None:
    """Right, if not quick: whatever has no gradient is left alone."""
    optimizer = make_optimizer(list(model.parameters()))

    def hook(parameter: Any) -> None:
        optimizer.step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)


def hooks_of_a_loop(model: Any, make_optimizer: Any) -> None:
    for parameter in model.parameters():
        optimizer = make_optimizer([parameter])

        def hook(p: Any) -> None:
            optimizer.step()  # noqa: B023 - the very mistake
            p.grad = None

        parameter.register_post_accumulate_grad_hook(hook)


def hooks_too_early(model: Any, make_optimizer: Any) -> None:
    for parameter in model.parameters():
        optimizer = make_optimizer([parameter])

        def hook(gradient: Any, p: Any = parameter, optimizer: Any = optimizer) -> None:
            optimizer.step()
            p.grad = None

        parameter.register_hook(hook)


def hooks_anew(model: Any, make_optimizer: Any) -> None:
    def hook(parameter: Any) -> None:
        make_optimizer([parameter]).step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)


def steps_at_the_end(model: Any, make_optimizer: Any) -> None:
    """All at a stroke, in the hook of the parameter whose gradient comes last."""
    parameters = list(model.parameters())
    optimizer = make_optimizer(parameters)

    def hook(parameter: Any) -> None:
        if all(one.grad is not None for one in parameters):
            optimizer.step()
            optimizer.zero_grad()

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(hook)


def outer(weights: Any, anchor: Any, momentum: Any, rate: float, decay: float) -> None:
    dist.all_reduce(weights)
    gradient = anchor - weights / dist.get_world_size()
    momentum *= decay
    momentum += gradient
    anchor -= rate * (gradient + decay * momentum)
    weights.copy_(anchor)


def outer_by_torch(weights: Any, anchor: Any, momentum: Any, rate: float, decay: float) -> None:
    dist.all_reduce(weights)
    anchor.grad = anchor - weights / dist.get_world_size()
    sgd = torch.optim.SGD([anchor], lr=rate, momentum=decay, nesterov=True)
    sgd.state[anchor]["momentum_buffer"] = momentum
    sgd.step()
    weights.copy_(anchor)


def outer_way(
    *,
    reduce: bool = True,
    divide: bool = True,
    back: bool = False,
    nesterov: bool = True,
    keep: bool = True,
    bring: bool = True,
    move: bool = True,
    twice: bool = False,
) -> Answer:
    def answer(weights: Any, anchor: Any, momentum: Any, rate: float, decay: float) -> None:
        gradient = anchor - weights
        if back:
            gradient = -gradient
        if reduce:
            dist.all_reduce(gradient)
        if reduce and divide:
            gradient /= dist.get_world_size()
        if keep:
            momentum.mul_(decay).add_(gradient)
        else:
            momentum = decay * momentum + gradient
        if twice:
            dist.all_reduce(momentum)
            momentum /= dist.get_world_size()
        new = anchor - rate * (gradient + decay * momentum if nesterov else momentum)
        if move:
            anchor.copy_(new)
        if bring:
            weights.copy_(new)

    return answer


def averages(weights: Any, anchor: Any, momentum: Any, rate: float, decay: float) -> None:
    dist.all_reduce(weights)
    weights /= dist.get_world_size()
    anchor.copy_(weights)


BANK: dict[str, list[tuple[Answer, str]]] = {
    "compress-signs": [
        (lambda x: torch.sign(x) * x.abs().mean(), "torch.sign has three results"),
        (lambda x: (2.0 * (x > 0) - 1) * x.abs().mean(), ">= rather than >"),
        (signs, "the scale is missing"),
        (lambda x: signs(x) * x.mean(), "cancel out"),
        (lambda x: signs(x) * x.norm() / len(x) ** 0.5, "keeps the norm"),
        (lambda x: signs(x) * x.abs().max(), "largest magnitude"),
        (lambda x: signs(x) * x.abs().sum(), "divide it by how many"),
        (lambda x: x.abs().mean(), "The shape is"),
        (lambda x: None, "returns nothing"),
        (lambda v: torch.where(v >= 0, 1.0, -1.0) * v.mean().abs(), "in which positive and negative ones cancel out"),
    ],
    "sign-bias": [
        (lambda draws: -bias_row_by_row(draws), "the other way round"),
        (lambda draws: scaled(draws.mean(0)) - draws.mean(0), "You compress the mean"),
        (lambda draws: (signs(draws) * draws.abs().mean() - draws).mean(0), "all rows together"),
        (lambda draws: bias_row_by_row(draws).abs(), "its sign tells which way"),
        (lambda draws: torch.stack([scaled(row) for row in draws]).mean(0), "mean of what arrives"),
        (lambda draws: torch.stack([scaled(row) - row for row in draws]).mean(), "One number is left"),
    ],
    "error-feedback": [
        (lambda x, e, c: (c(x), x - c(x)), "never said"),
        (lambda x, e, c: (c(x), e + x - c(x)), "The errors pile up"),
        (lambda x, e, c: (c(x + e), x - c(x + e)), "gets lost"),
        (lambda x, e, c: (c(x + e), c(x + e) - x - e), "wrong sign"),
        (lambda x, e, c: (c(x - e), x - e - c(x - e)), "You take the error away"),
        (lambda x, e, c: (c(x + e), x + 2 * e - c(x + e)), "counts twice"),
        (lambda x, e, c: (c(x) + e, x - c(x)), "32 bits per number again"),
        (lambda x, e, c: fed(x, e, c)[::-1], "swapped"),
        (lambda x, e, c: (x + e, torch.zeros_like(x)), "Nothing is compressed"),
        (lambda x, e, c: c(x + e), "2 results are expected"),
        (lambda x, e, c: (c(x + e), 0.0), "Both results have the shape"),
        (lambda x, e, c: None, "returns nothing"),
        (lambda v, e, compress: (compress(v + e), v + e - compress(v)), "not what that message leaves out"),
    ],
    "compressed-all-reduce": [
        (way(in_place=False), "neither error is kept"),
        (way(server=False), "The servers forget"),
        (forgetful_worker, "The workers forget"),
        (keeps_the_last_error_only, "loses what had been left unsaid before"),
        (way(average=False), "divide by the number of ranks"),
        (way(way_back="floats"), "come back uncompressed"),
        (way(way_there="floats"), "numbers of 32 bits travel"),
        (way(way_there="gather"), "Each chunk goes to its server only"),
        (talks_to_itself, "Every rank gets back what it has said itself"),
        (lambda values, worker_error, server_error: None, "returns nothing"),
    ],
    "compressed-bytes": [
        (lambda n, ranks: 2 * (ranks - 1) * math.ceil(math.ceil(n / ranks) / 8), "The scales are missing"),
        (lambda n, ranks: 2 * (ranks - 1) * (math.ceil(math.ceil(n / ranks) / 8) + 4), "one scale per message"),
        (lambda n, ranks: sent(n, ranks) / 2, "one of the two exchanges"),
        (lambda n, ranks: sent(n, ranks) * ranks / (ranks - 1), "the message that is for itself"),
        (lambda n, ranks: 2 * (ranks - 1) * whole_message(n), "the whole vector"),
        (
            lambda n, ranks: (
                8 * 2 * (ranks - 1) * (math.ceil(math.ceil(n / ranks) / 8) + 4 * math.ceil(n / ranks / 2048))
            ),
            "in bits",
        ),
        (lambda n, ranks: 2 * (ranks - 1) * n / ranks * (1 / 8 + 4 / 2048), "Bytes and scales come whole"),
        (lambda n, ranks: 2 * (ranks - 1) * 32 * math.ceil(math.ceil(n / ranks) / 8), "all-reduce in fp32"),
        (lambda n, ranks: n / 8, "is expected, but your function returns"),
    ],
    "freeze-step": [
        (frozen_by(lambda a, b, least: min(a, b) / max(a, b) >= least, back=1), "neighbouring steps"),
        (frozen_by(lambda a, b, least: a / b >= least), "Where the norm falls"),
        (frozen_by(lambda a, b, least: b / a >= least), "Where the norm rises"),
        (frozen_by(lambda a, b, least: min(a, b) / max(a, b) <= least), "where the norm still moves"),
        (lambda norms, beta2, least: frozen(norms, beta2, least) - round(1 / (1 - beta2)), "return the later one"),
        (lambda norms, beta2, least: 0, "a norm is compared with itself"),
        (lambda norms, beta2, least: len(norms) // 2, "is expected, but your function returns"),
        (lambda norms, beta2, least: None, "returns nothing"),
    ],
    "fused-traffic": [
        (lambda operations, states: traffic(operations, states)[::-1], "swapped"),
        (lambda operations, states: tuple(n // 4 for n in traffic(operations, states)), "You count tensors"),
        (
            lambda operations, states: (
                sum(4 * (len(r) + len(w)) for r, w in operations),
                traffic(operations, states)[1],
            ),
            "names a tensor twice",
        ),
        (
            lambda operations, states: (
                traffic(operations, states)[0],
                traffic(operations, {n for r, w in operations for n in (*r, *w)})[1],
            ),
            "a temporary tensor is never in memory",
        ),
        (
            lambda operations, states: (
                traffic(operations, states)[0],
                4 * len(states & {n for r, _ in operations for n in r})
                + 4 * len(states & {n for _, w in operations for n in w}),
            ),
            "written before it is first read",
        ),
        (lambda operations, states: (traffic(operations, states)[0], 4 * len(states)), "goes both ways"),
        (lambda operations, states: (traffic(operations, states)[0], 8 * len(states)), "does not go back"),
        (lambda operations, states: traffic(operations, states)[0], "return 2 numbers"),
    ],
    "update-in-backward": [
        (lambda model, make: None, "No weight has moved"),
        (hooks(stepped), "The gradients are never freed"),
        (hooks(stepped, lambda optimizer, parameter: parameter.grad.zero_()), "zeros take as much room"),
        (hooks_of_a_loop, "Only the last parameter moves"),
        (hooks_too_early, "one step late"),
        (hooks_anew, "made anew in every hook"),
        (steps_at_the_end, "are there at once"),
    ],
    "outer-step": [
        (outer_way(reduce=False), "Every rank uses its own difference"),
        (outer_way(back=True), "You walk back"),
        (outer_way(divide=False), "added up over the ranks"),
        (outer_way(nesterov=False), "plain momentum"),
        (outer_way(keep=False), "momentum is not kept"),
        (outer_way(bring=False), "weights stay where each rank has left them"),
        (outer_way(move=False), "anchor stays at the start"),
        (outer_way(twice=True), "the same on all ranks already"),
        (averages, "That is Local SGD"),
    ],
}


REFERENCES: dict[str, Answer] = {
    "compress-signs": scaled,
    "sign-bias": bias_row_by_row,
    "error-feedback": fed,
    "compressed-all-reduce": all_reduced,
    "compressed-bytes": sent,
    "freeze-step": frozen,
    "fused-traffic": traffic,
    "update-in-backward": hooks(stepped, lambda optimizer, parameter: optimizer.zero_grad()),
    "outer-step": outer,
}
OTHER_RIGHT_ANSWERS: list[tuple[str, Answer]] = [
    ("compress-signs", lambda x: torch.full_like(x, x.abs().mean()) * torch.where(x < 0, -1.0, 1.0)),
    ("update-in-backward", one_optimizer_for_all),
    ("update-in-backward", update_in_backward),
    ("outer-step", outer_by_torch),
    ("outer-step", outer_way()),
]


WRONG = {name: [*answers, *student.WRONG[name]] for name, answers in BANK.items()}


# The challenge: valid answers that miss its target, others that reach it, and what is refused.


def whole(gradient: Any, memory: dict[str, Any]) -> Any:
    dist.all_reduce(gradient)
    return gradient / 2


def halved(gradient: Any, memory: dict[str, Any]) -> Any:
    small = gradient.bfloat16()
    dist.all_reduce(small)
    return small.float() / 2


def largest_few(gradient: Any, memory: dict[str, Any], keep: bool = True) -> Any:
    left = memory.get("left", torch.zeros_like(gradient)) + gradient
    places = left.abs().topk(len(left) * 3 // 100).indices
    values, places = left[places], places.to(torch.int32)
    left[places] = 0
    if keep:
        memory["left"] = left
    all_values, all_places = ([torch.empty_like(one) for _ in range(2)] for one in (values, places))
    dist.all_gather(all_values, values)
    dist.all_gather(all_places, places)
    mean = torch.zeros_like(gradient)
    for some, at in zip(all_values, all_places, strict=True):
        mean.index_add_(0, at, some / 2)
    return mean


def one_bit(gradient: Any, memory: dict[str, Any]) -> Any:
    """One bit per number to the other rank's server and back, both errors kept."""
    half = len(gradient) // 2
    worker = memory.setdefault("worker", torch.zeros(2, half))
    server = memory.setdefault("server", torch.zeros(half))
    worker += gradient.view(2, half)
    told = torch.stack([write(F.pad(row, (0, -half % 8))) for row in worker])
    worker -= torch.stack([read(one)[:half] for one in told])
    received = torch.empty_like(told)
    dist.all_to_all_single(received, told)
    server += torch.stack([read(one)[:half] for one in received]).mean(0)
    message = write(F.pad(server, (0, -half % 8)))
    server -= read(message)[:half]
    dist.all_gather_into_tensor(received, message[None])
    return torch.cat([read(one)[:half] for one in received])


def seldom(gradient: Any, memory: dict[str, Any]) -> Any:
    memory["step"], memory["sum"] = memory.get("step", 0) + 1, memory.get("sum", 0) + gradient
    if memory["step"] % 10:
        return torch.zeros_like(gradient)
    total = memory.pop("sum")
    dist.all_reduce(total)
    return total / 2


@pytest.mark.parametrize(("answer", "score"), [(whole, 100.0), (halved, 50.0)])
def test_judge_of_fewer_bytes_finds_first_ideas_valid_and_short_of_the_target(answer: Answer, score: float) -> None:
    verdict = judge(FEWER_BYTES, answer)
    assert (verdict.state, verdict.score) == ("note", score), verdict.message


@pytest.mark.parametrize(("answer", "most"), [(largest_few, 6.0), (one_bit, 4.0)])
def test_judge_of_fewer_bytes_sees_its_target_reached_by_more_than_one_way(answer: Answer, most: float) -> None:
    verdict = judge(FEWER_BYTES, answer)
    assert verdict.state == "right", verdict.message
    assert verdict.score is not None and verdict.score < most


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda gradient, memory: gradient, "different weights"),
        (lambda gradient, memory: torch.zeros_like(gradient), "more than 3% above"),
        (lambda gradient, memory: largest_few(gradient, memory, keep=False), "more than 3% above"),
        (seldom, "more than 3% above"),
        (lambda gradient, memory: whole(gradient, memory)[:7], "its shape is (7,)"),
        (lambda gradient, memory: 3.0, "returns a float"),
    ],
)
def test_judge_of_fewer_bytes_refuses_what_breaks_the_rules(answer: Answer, words: str) -> None:
    verdict = judge(FEWER_BYTES, answer)
    assert verdict.state == "wrong"
    assert words in verdict.message


class TestBank(BankTests):
    exercises, predictions = EXERCISES, lab09_optimizers.PREDICTIONS
    wrong, right = WRONG, REFERENCES
    others = (*OTHER_RIGHT_ANSWERS, *student.RIGHT)


@pytest.mark.parametrize("numel", [8, 24, 2048, 2056, 4096, 10_000])
def test_write_and_read_of_a_message_are_those_of_the_package(numel: int) -> None:
    """What is read is one sign and one scale of 2048 numbers at most, in as many bytes as are counted."""
    from dlojz.by_hand.optimizers.sent_bytes import chunk_bytes

    values: Any = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    message: Any = write(values)
    assert message.dtype == torch.uint8
    assert message.numel() == chunk_bytes(numel)
    told: Any = read(message)
    blocks = zip(values.split(2048), told.split(2048), strict=True)
    assert all(torch.allclose(compress(block), back, rtol=1e-6) for block, back in blocks)


def test_write_refuses_a_vector_that_does_not_fill_its_bytes() -> None:
    with pytest.raises(LabError, match=r"multiple of 8, but the shape \(12,\) was received"):
        write(torch.zeros(12))


@pytest.mark.parametrize(("parameters", "ranks"), [(123_456, 2), (1_000_003, 4), (77, 3)])
def test_the_bytes_are_those_that_the_package_predicts(parameters: int, ranks: int) -> None:
    from dlojz.by_hand.optimizers.sent_bytes import message_bytes

    on_the_wire = 2 * message_bytes(parameters, ranks) * (ranks - 1) / ranks
    assert compressed_bytes(parameters, ranks) == pytest.approx(on_the_wire, rel=1e-12)


def test_simulated_exchange_is_the_compressed_all_reduce_of_the_package() -> None:
    from dlojz.by_hand.optimizers.one_bit import CompressedAllReduce
    from dlojz.labs.lab09_optimizers.exercises_compression import CALLS, simulated, values_of
    from dlojz.processes.forks import spmd

    def on_rank(rank: int, size: int) -> Any:
        reduce = CompressedAllReduce(values_of(rank, size, 7, 0).numel(), torch.device("cpu"))
        means = {f"mean of call {call}": reduce([values_of(rank, size, 7, call)]).clone() for call in range(CALLS)}
        return None, means | {"worker error": reduce.worker_error, "server error": reduce.server_error}

    for rank, answer in enumerate(spmd(on_rank, 3)):
        assert answer.error is None
        for name, value in simulated(3, 7)[rank].items():
            assert torch.allclose(answer.tensors[name], value, rtol=1e-5, atol=1e-6), name


def test_adam_moves_72_bytes_apart_and_28_in_one_kernel() -> None:
    """Of four states three go both ways, and the gradient one: 4 × 7 bytes."""
    assert update_traffic(ADAM, ADAM_STATES) == (72, 28)


@pytest.mark.parametrize("size", [2, 3])
def test_the_outer_step_is_that_of_the_packages_diloco(size: int) -> None:
    """Weights, round after round, of an inner optimizer that goes where the exercise's own training goes."""
    from dlojz.by_hand.optimizers.local_sgd import OUTER_MOMENTUM, OUTER_RATE, DiLoCo
    from dlojz.labs.kit.judges import normal
    from dlojz.labs.lab09_optimizers.exercises_updates import MOMENTUM, NUMEL, RATE, ROUNDS, local_steps, simulated
    from dlojz.processes.forks import spmd

    assert (RATE, MOMENTUM) == (OUTER_RATE, OUTER_MOMENTUM)

    def on_rank(rank: int, size: int) -> Any:
        weights = nn.Parameter(normal(5, NUMEL))
        optimizer = DiLoCo([weights], lr=0.0, local_steps=2)
        held = {}
        for number in range(ROUNDS):
            optimizer.step()  # in the first one it notes where it starts from
            weights.data += local_steps(rank, 5, number)  # a training of its own, instead of the inner AdamW
            optimizer.step()
            held[f"weights of round {number}"] = weights.detach().clone()
        return None, held

    for rank, answer in enumerate(spmd(on_rank, size)):
        assert answer.error is None, answer.error
        for name, value in answer.tensors.items():
            assert torch.allclose(value, simulated(size, 5)[rank][name], rtol=1e-5, atol=1e-6), name
