"""Answers of lab 09 as students write them, from its text alone: right ones, and wrong ones with their words."""

import functools
import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dlojz.labs.lab09_optimizers.exercises_compression import read, write
from tests.labs.bank import Answer

# One bit.


def compressed(
    scale: Any = lambda x: x.abs().mean(),
    sign: Any = lambda x: torch.where(x >= 0, 1.0, -1.0),
    times: Any = lambda s, c: s * c,
) -> Answer:
    return lambda x: times(sign(x), scale(x))


def compressed_one_by_one(values: Any) -> Any:
    scale = sum(abs(v) for v in values.flatten().tolist()) / values.numel()
    return torch.tensor([scale if v >= 0 else -scale for v in values.flatten().tolist()]).view(values.shape)


def compressed_by_masks(values: Any) -> Any:
    told, scale = torch.empty_like(values), values.abs().mean()
    told[values >= 0] = scale
    told[values < 0] = -scale
    return told


def compressed_by_numpy(values: Any) -> Any:
    x = values.numpy()
    return torch.from_numpy(np.where(x < 0, -1, 1).astype(np.float32) * np.abs(x).mean())


def compressed_in_place(values: Any) -> Any:
    scale = values.abs().mean()
    values[values >= 0] = scale
    values[values < 0] = -scale
    return values


def bias(
    arrives: Any = lambda draws: torch.stack([compressed()(row) for row in draws]),
    mean: Any = lambda t: t.mean(0),
    end: Any = lambda a, b: a - b,
) -> Answer:
    return lambda draws: end(mean(arrives(draws)), mean(draws))


def bias_weight_by_weight(draws: Any) -> Any:
    told = [compressed_one_by_one(row) for row in draws]
    return torch.stack(
        [sum(t[j] for t in told) / len(told) - draws[:, j].sum() / len(draws) for j in range(draws.shape[1])]
    )


def fed(values: Any, error: Any, compress: Any) -> Any:
    told = compress(values + error)
    return told, (values + error).sub(told)


def fed_into_error(values: Any, error: Any, compress: Any) -> Any:
    error += values
    told = compress(error)
    error -= told
    return told, error


def fed_on_a_copy(values: Any, error: Any, compress: Any) -> Any:
    left = error.clone().add_(values)
    told = compress(left.clone())
    left.sub_(told)
    return [told, left]


# The compressed all-reduce.


def exchanged(
    add: Any = lambda error, values: error.add_(values),
    mean: Any = lambda rows: rows.mean(0),
    messages: Any = lambda rows: torch.stack([write(row) for row in rows]),
    send: Any = None,
    server: Any = lambda server_error, own: server_error.add_(own),
    gather: Any = None,
    worker_left: Any = lambda error, told: error.sub_(told),
    server_left: Any = lambda error, told: error.sub_(told),
) -> Answer:
    def all_to_all(told: Any) -> Any:
        received = torch.zeros_like(told)
        dist.all_to_all_single(received, told)
        return received

    def all_gather(message: Any) -> Any:
        everything = torch.empty(dist.get_world_size(), len(message), dtype=message.dtype)
        dist.all_gather_into_tensor(everything, message.unsqueeze(0))
        return everything

    def answer(values: Any, worker_error: Any, server_error: Any) -> Any:
        meant = add(worker_error, values)
        told = messages(meant.view(dist.get_world_size(), -1))
        worker_left(worker_error, torch.cat([read(one) for one in told]))
        own = server(server_error, mean(torch.stack([read(one) for one in (send or all_to_all)(told)])))
        message = write(own)
        server_left(server_error, read(message))
        return torch.cat([read(one) for one in (gather or all_gather)(message)])

    return answer


def sent_as_list(told: Any) -> Any:
    received = [torch.empty_like(one) for one in told]
    dist.all_to_all(received, list(told))
    return torch.stack(received)


def gathered_as_list(message: Any) -> Any:
    parts = [torch.empty_like(message) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, message)
    return parts


def gathered_flat(message: Any) -> Any:
    everything = torch.empty(dist.get_world_size() * len(message), dtype=torch.uint8)
    dist.all_gather_into_tensor(everything, message)
    return everything.chunk(dist.get_world_size())


def all_reduced_in_full(values: Any, worker_error: Any, server_error: Any) -> Any:
    mean = values.clone()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def compressed_sum_reduced(values: Any, worker_error: Any, server_error: Any) -> Any:
    worker_error += values
    told = read(write(worker_error))
    worker_error -= told
    dist.all_reduce(told)
    return told / dist.get_world_size()


def overwrites_values(values: Any, worker_error: Any, server_error: Any) -> Any:
    values += worker_error
    told = torch.cat([read(write(row)) for row in values.view(dist.get_world_size(), -1)])
    result = exchanged(add=lambda error, v: v, worker_left=lambda error, t: None)(values, worker_error, server_error)
    worker_error.copy_(values - told)
    return result


# Bytes, steps.


def bytes_sent(
    chunk: Any = lambda n, ranks: 8 * math.ceil(math.ceil(n / ranks) / 8),
    message: Any = lambda chunk: chunk // 8 + 4 * math.ceil(chunk / 2048),
    times: Any = lambda ranks: 2 * (ranks - 1),
) -> Answer:
    return lambda n, ranks: times(ranks) * message(chunk(n, ranks))


def bytes_in_a_loop(n: int, ranks: int) -> int:
    chunk = -(-n // ranks)
    while chunk % 8:
        chunk += 1
    scales, left = 0, chunk
    while left > 0:
        scales, left = scales + 1, left - 2048
    return sum(chunk // 8 + 4 * scales for _exchange in range(2) for _other in range(ranks - 1))


def frozen(
    delta: Any = lambda beta2: round(1 / (1 - beta2)),
    start: Any = lambda delta: delta,
    test: Any = lambda a, b, least: min(a, b) / max(a, b) >= least,
    end: Any = lambda t, delta: t,
    never: Any = len,
) -> Answer:
    def answer(norms: Any, beta2: float, threshold: float) -> Any:
        d = delta(beta2)
        for t in range(start(d), len(norms)):
            if test(norms[t - d], norms[t], threshold):
                return end(t, d)
        return never(norms)

    return answer


def frozen_by_numpy(norms: Any, beta2: float, threshold: float) -> Any:
    d, n = round(1 / (1 - beta2)), np.asarray(norms, dtype=float)
    if len(n) <= d:
        return len(n)
    ratio = np.minimum(n[:-d], n[d:]) / np.maximum(n[:-d], n[d:])
    return d + int(np.argmax(ratio >= threshold)) if (ratio >= threshold).any() else len(n)


def frozen_by_torch(norms: Any, beta2: float, threshold: float) -> Any:
    d, n = int(1 / (1 - beta2) + 0.5), torch.tensor(norms, dtype=torch.float64)
    both = torch.stack([n[: max(len(n) - d, 0)], n[d:]])
    found = ((both.amin(0) / both.amax(0)) >= threshold).nonzero()
    return found[0, 0] + d if len(found) else len(norms)


def frozen_in_a_while(norms: Any, beta2: float, threshold: float) -> Any:
    d = round(1 / (1 - beta2))
    t = d
    while t < len(norms):
        low, high = sorted([norms[t], norms[t - d]])
        if low >= threshold * high:
            break
        t += 1
    return min(t, len(norms)) if len(norms) > d else len(norms)


# Fused updates.


def moved(
    one: Any = lambda reads, writes: len(set(reads)) + len(set(writes)),
    size: int = 4,
    all_in_one: Any = None,
) -> Answer:
    def needed(operations: Any, states: Any) -> int:
        read_in, written = [], []
        for reads, writes in operations:
            read_in += [n for n in dict.fromkeys(reads) if n in states and n not in written and n not in read_in]
            written += [n for n in writes if n in states and n not in written]
        return len(read_in) + len(written)

    return lambda operations, states: (
        size * sum(one(reads, writes) for reads, writes in operations),
        size * (all_in_one or needed)(operations, states),
    )


def moved_state_by_state(operations: Any, states: Any) -> Any:
    apart = sum(len({*reads}) + len({*writes}) for reads, writes in operations) * 4
    together = 0
    for state in states:
        first = next((("r" if state in r else "w") for r, w in operations if state in r or state in w), "")
        together += 4 * (first == "r") + 4 * any(state in w for _, w in operations)
    return [apart, together]


def hooked(
    act: Any = lambda optimizer, parameter: optimizer.step(),
    free: Any = lambda optimizer, parameter: setattr(parameter, "grad", None),
    which: Any = lambda model: model.parameters(),
) -> Answer:
    def answer(model: Any, make_optimizer: Any) -> None:
        for parameter in which(model):
            optimizer = make_optimizer([parameter])

            def hook(p: Any, optimizer: Any = optimizer) -> None:
                act(optimizer, p)
                free(optimizer, p)

            parameter.register_post_accumulate_grad_hook(hook)

    return answer


def hooked_by_partial(model: Any, make_optimizer: Any) -> None:
    def hook(optimizer: Any, parameter: Any) -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(functools.partial(hook, make_optimizer([parameter])))


class Updater:
    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def __call__(self, parameter: Any) -> None:
        self.optimizer.step()
        del parameter.grad


def hooked_by_objects(model: Any, make_optimizer: Any) -> None:
    for parameter in list(model.parameters()):
        parameter.register_post_accumulate_grad_hook(Updater(make_optimizer([parameter])))


def hooked_by_table(model: Any, make_optimizer: Any) -> Any:
    model.optimizers = {id(p): make_optimizer([p]) for p in model.parameters()}

    def hook(p: Any) -> None:
        model.optimizers[id(p)].step()
        model.optimizers[id(p)].zero_grad()

    return [p.register_post_accumulate_grad_hook(hook) for p in model.parameters()]


def hooked_by_module(model: Any, make_optimizer: Any) -> None:
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            step = make_optimizer([parameter]).step
            parameter.register_post_accumulate_grad_hook(lambda p, step=step: (step(), setattr(p, "grad", None))[-1])


def sgd_by_hand(model: Any, make_optimizer: Any) -> None:
    def hook(p: Any) -> None:
        with torch.no_grad():
            p -= 0.1 * p.grad
        p.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)


def hooked_on_modules(model: Any, make_optimizer: Any) -> None:
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if own:
            optimizer = make_optimizer(own)

            def hook(m: Any, *gradients: Any, optimizer: Any = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            module.register_full_backward_hook(hook)


def steps_at_once(model: Any, make_optimizer: Any) -> None:
    optimizer = make_optimizer(list(model.parameters()))
    optimizer.step()
    optimizer.zero_grad()


# The outer step.


def outer(
    mean: Any = lambda w: w / dist.get_world_size(),
    difference: Any = lambda anchor, mean: anchor - mean,
    velocity: Any = lambda u, d, decay: u.copy_(decay * u + d),
    move: Any = lambda anchor, d, u, rate, decay: anchor.sub_(rate * (d + decay * u)),
    bring: Any = lambda weights, anchor: weights.copy_(anchor),
) -> Answer:
    def answer(weights: Any, anchor: Any, momentum: Any, rate: float, decay: float) -> None:
        whole = weights.clone()
        dist.all_reduce(whole)
        d = difference(anchor, mean(whole))
        velocity(momentum, d, decay)
        move(anchor, d, momentum, rate, decay)
        bring(weights, anchor)

    return answer


def outer_gathered(weights: Any, anchor: Any, momentum: Any, rate: float, decay: float) -> None:
    parts = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, weights)
    d = anchor - torch.stack(parts).mean(0)
    momentum[:] = decay * momentum + d
    anchor.add_(d + decay * momentum, alpha=-rate)
    weights[:] = anchor


def outer_halved_first(weights: Any, anchor: Any, momentum: Any, rate: float, decay: float) -> None:
    d = (anchor - weights).div_(dist.get_world_size())
    dist.all_reduce(d, async_op=True).wait()
    momentum.mul_(decay)
    momentum += d
    anchor -= rate * d
    anchor -= rate * decay * momentum
    weights.zero_().add_(anchor)


def outer_rebound(weights: Any, anchor: Any, momentum: Any, rate: float, decay: float) -> None:
    d = anchor - weights
    dist.all_reduce(d)
    d = d / dist.get_world_size()
    momentum = decay * momentum + d
    anchor = anchor - rate * (d + decay * momentum)
    weights = anchor


RIGHT: list[tuple[str, Answer]] = [
    ("compress-signs", compressed()),
    ("compress-signs", compressed(scale=lambda x: x.norm(1) / x.numel())),
    ("compress-signs", compressed(sign=lambda x: 1.0 - 2.0 * (x < 0).to(x.dtype))),
    ("compress-signs", compressed(sign=lambda x: (x >= 0).float().mul(2).sub(1), times=torch.mul)),
    ("compress-signs", lambda x: torch.where(x < 0, -x.abs().mean(), x.abs().mean())),
    ("compress-signs", compressed(scale=lambda x: x.abs().mean(-1, keepdim=True))),
    ("compress-signs", compressed_one_by_one),
    ("compress-signs", compressed_by_masks),
    ("compress-signs", compressed_by_numpy),
    ("sign-bias", bias()),
    ("sign-bias", bias(arrives=lambda draws: torch.where(draws >= 0, 1.0, -1.0) * draws.abs().mean(1, keepdim=True))),
    ("sign-bias", bias(arrives=torch.vmap(compressed()))),
    ("sign-bias", bias(mean=lambda t: t.sum(dim=0).div(len(t)))),
    ("sign-bias", bias(mean=lambda t: torch.einsum("nd->d", t) / t.shape[0], end=torch.sub)),
    ("sign-bias", lambda draws: (torch.stack(list(map(compressed_by_masks, draws))) - draws).mean(dim=0)),
    ("sign-bias", bias_weight_by_weight),
    ("error-feedback", fed),
    ("error-feedback", fed_on_a_copy),
    ("error-feedback", fed_into_error),
    ("error-feedback", lambda v, e, c: (c(v + e), v + e - c(v + e))),
    ("error-feedback", lambda v, e, c: (c(torch.add(v, e)), v - (c(v + e) - e))),
    ("error-feedback", lambda v, e, c: next((told, e + (v - told)) for told in [c(e + v)])),
    ("error-feedback", lambda v, e, c: next((c(m.clone()), m - c(m)) for m in [torch.stack([v, e]).sum(0)])),
    ("compressed-all-reduce", exchanged()),
    ("compressed-all-reduce", exchanged(send=sent_as_list)),
    ("compressed-all-reduce", exchanged(gather=gathered_as_list)),
    ("compressed-all-reduce", exchanged(gather=gathered_flat)),
    ("compressed-all-reduce", exchanged(mean=lambda rows: rows.sum(0) / len(rows))),
    ("compressed-all-reduce", exchanged(add=lambda error, v: error.copy_(error + v))),
    (
        "compressed-all-reduce",
        exchanged(
            server=lambda error, own: error.copy_(own + error),
            worker_left=lambda error, told: error.copy_(error - told),
        ),
    ),
    ("compressed-bytes", bytes_sent()),
    ("compressed-bytes", bytes_sent(chunk=lambda n, ranks: (-(-n // ranks) + 7) // 8 * 8)),
    ("compressed-bytes", bytes_sent(message=lambda chunk: chunk / 8 + 4 * -(-chunk // 2048))),
    ("compressed-bytes", bytes_in_a_loop),
    (
        "compressed-bytes",
        lambda n, ranks: (
            int(np.ceil(np.ceil(n / ranks) / 8) + 4 * np.ceil(np.ceil(np.ceil(n / ranks) / 8) / 256)) * 2 * (ranks - 1)
        ),
    ),
    ("freeze-step", frozen()),
    ("freeze-step", frozen(test=lambda a, b, least: a >= least * b and b >= least * a)),
    ("freeze-step", frozen(test=lambda a, b, least: min(a / b, b / a) >= least)),
    ("freeze-step", frozen(delta=lambda beta2: int(1 / (1 - beta2) + 0.5))),
    ("freeze-step", frozen_by_numpy),
    ("freeze-step", frozen_by_torch),
    ("freeze-step", frozen_in_a_while),
    ("fused-traffic", moved()),
    ("fused-traffic", moved_state_by_state),
    ("fused-traffic", lambda operations, states: np.array(moved()(operations, states))),
    ("fused-traffic", lambda operations, states: torch.tensor(moved()(operations, states))),
    (
        "fused-traffic",
        lambda operations, states: moved()([(tuple(r), tuple(w)) for r, w in operations], sorted(states)),
    ),
    ("update-in-backward", hooked()),
    ("update-in-backward", hooked(free=lambda optimizer, p: optimizer.zero_grad())),
    ("update-in-backward", hooked_by_partial),
    ("update-in-backward", hooked_by_objects),
    ("update-in-backward", hooked_by_table),
    ("update-in-backward", hooked_by_module),
    ("outer-step", outer()),
    (
        "outer-step",
        outer(
            velocity=lambda u, d, decay: u.mul_(decay).add_(d),
            bring=lambda weights, anchor: weights.set_(anchor.clone()),
        ),
    ),
    ("outer-step", outer(move=lambda anchor, d, u, rate, decay: anchor.copy_(anchor - rate * d - rate * decay * u))),
    ("outer-step", outer(mean=lambda w: w.mul_(1 / dist.get_world_size()))),
    ("outer-step", outer(difference=lambda anchor, mean: -(mean - anchor))),
    ("outer-step", outer_halved_first),
]

WRONG: dict[str, list[tuple[Answer, str]]] = {
    "compress-signs": [
        (compressed(scale=lambda x: x.abs().median()), "Your scale is not the mean magnitude"),
        (compressed(scale=lambda x: x.pow(2).mean()), "Your scale is not the mean magnitude"),
        (compressed(scale=lambda x: x.std()), "Your scale is not the mean magnitude"),
        (compressed(sign=lambda x: torch.where(x >= 0, 1.0, 0.0)), "a bit tells + from −, so torch.where(values"),
        (compressed(sign=lambda x: torch.where(x >= 0, -1.0, 1.0)), "The signs are the other way round."),
        (compressed(times=lambda s, c: s / c), "You divide by the scale: multiply."),
        (compressed(times=lambda s, c: (s, c)), "Your function returns a tuple, but a torch"),
        (compressed(scale=lambda x: x.abs()), "Each number keeps its own magnitude, so"),
        (compressed_in_place, "Your function writes into `values`, which"),
    ],
    "sign-bias": [
        (bias(mean=lambda t: t.mean(1)), "You take the mean over the weights: each"),
        (bias(mean=lambda t: t.sum(0)), "You add the draws up: take their mean."),
        (bias(mean=lambda t: t.median(0).values), "You take medians: the bias is a difference of"),
        (bias(end=lambda a, b: a + b), "You add what should have arrived: take it"),
        (bias(end=lambda a, b: (a - b) / b), "You divide by the mean: the difference itself"),
        (bias(end=lambda a, b: (a - b) ** 2), "You square the difference: its sign tells"),
        (bias(arrives=lambda draws: draws.sign()), "The scale is missing: each row is compressed"),
        (
            bias(arrives=lambda draws: draws.sign() * draws.abs().mean(0)),
            "You take one scale per weight: a gradient, a",
        ),
        (bias(arrives=lambda draws: draws), "nothing has been compressed."),
        (lambda draws: compressed()(draws[0]) - draws[0], "You look at the first gradient alone: the"),
    ],
    "error-feedback": [
        (lambda v, e, c: (c(v + e), v - c(v)), "What is left is taken from values alone: what"),
        (lambda v, e, c: (c(v) + c(e), v + e - c(v) - c(e)), "You compress twice: what is sent is one"),
        (lambda v, e, c: (c(v + e), e - c(v + e)), "What is left forgets the new values: values +"),
        (lambda v, e, c: (c(v + e), e + v), "What was sent is not subtracted from what is"),
        (lambda v, e, c: (v + e - c(v + e), v + e - c(v + e)), "You send what is left: what is sent is"),
        (lambda v, e, c: (c(v + e), (v + e - c(v + e)).abs()), "What is left lost its sign: no abs()."),
        (
            lambda v, e, c: (compressed()(v + e), v + e - compressed()(v + e)),
            "You call your own compression: use the one",
        ),
        (lambda v, e, c: (c(v + e), torch.zeros_like(e)), "Nothing is left to say: the error of this"),
        (lambda v, e, c: (c((v + e) / 2), v + e - c((v + e) / 2)), "You average values and error: they add up."),
    ],
    "compressed-all-reduce": [
        (all_reduced_in_full, "The mean is exact: nothing is compressed, and"),
        (compressed_sum_reduced, "Each rank compresses its whole vector once"),
        (overwrites_values, "Your function writes into `values`, which"),
        (exchanged(server_left=lambda error, told: error.add_(told)), "What the server answers is not taken away"),
        (exchanged(worker_left=lambda error, told: None), "What the worker has told is not taken away"),
        (exchanged(send=lambda told: told), "The messages stay where they are: each server"),
    ],
    "compressed-bytes": [
        (bytes_sent(chunk=lambda n, ranks: n // ranks // 8 * 8), "You round the chunk down: all numbers must"),
        (bytes_sent(chunk=lambda n, ranks: math.ceil(n / ranks)), "The chunk is not filled up to a multiple of 8"),
        (bytes_sent(message=lambda chunk: chunk // 8 + 4 * (chunk // 2048)), "A block of"),
        (bytes_sent(message=lambda chunk: chunk // 8 + math.ceil(chunk / 2048)), "bytes: you count one."),
        (
            bytes_sent(message=lambda chunk: chunk + 4 * math.ceil(chunk / 2048)),
            "You count a byte per number: eight signs make",
        ),
        (bytes_sent(message=lambda chunk: 4 * chunk), "bytes per number. Here a number takes one bit."),
        (bytes_sent(times=lambda ranks: 2 * ranks), "A rank does not send the message that is for"),
        (bytes_sent(times=lambda ranks: 2 * (ranks - 1) / ranks), "You divide by the number of ranks once more"),
        (bytes_sent(times=lambda ranks: 2), "You count one message per exchange: a rank"),
        (bytes_sent(times=lambda ranks: ranks - 1), "That is one of the two exchanges: chunks go"),
    ],
    "freeze-step": [
        (frozen(test=lambda a, b, least: min(a, b) / max(a, b) > least), "A ratio that equals the threshold is enough"),
        (frozen(start=lambda delta: delta + 1), "You begin one step late: step Δ can be"),
        (frozen(delta=lambda beta2: int(1 / (1 - beta2))), "Δ is not rounded to the nearest"),
        (frozen(delta=lambda beta2: math.ceil(1 / (1 - beta2))), "Δ is not rounded to the nearest"),
        (frozen(end=lambda t, delta: t + 1), "That is a step beside the one that is found"),
        (frozen(never=lambda norms: -1), "Right wherever there is such a step; where"),
        (frozen(never=lambda norms: None), "Your function returns nothing: end it with"),
        (frozen(never=lambda norms: len(norms) - 1), "Right wherever there is such a step; where"),
        (frozen(test=lambda a, b, least: abs(a - b) <= 1 - least), "You compare the difference of the norms: it"),
        (frozen(test=lambda a, b, least: max(a, b) / min(a, b) >= least), "You divide the larger by the smaller"),
        (frozen(start=lambda delta: 1), "You begin before step Δ: norms[t − Δ] with a"),
        (
            lambda norms, beta2, least: max(
                [
                    t
                    for t in range(20, len(norms))
                    if min(norms[t], norms[t - 20]) / max(norms[t], norms[t - 20]) >= least
                ],
                default=len(norms),
            ),
            "41 is expected, but your function returns 199",
        ),
    ],
    "fused-traffic": [
        (moved(size=2), "bytes per number: fp"),
        (moved(size=8), "bytes per number: fp"),
        (moved(one=lambda reads, writes: len(set(reads) | set(writes))), "A tensor that an operation reads and writes"),
        (moved(one=lambda reads, writes: len(set(reads))), "You count what is read only: what is written"),
        (moved(one=lambda reads, writes: 2), "You count two tensors for every operation"),
        (
            moved(all_in_one=lambda operations, states: len({n for r, w in operations for n in (*r, *w)})),
            "You count each name once, temporaries",
        ),
        (
            moved(all_in_one=lambda operations, states: len(set(states) & {n for _, w in operations for n in w})),
            "In one kernel you count one way only: states",
        ),
        (
            moved(all_in_one=lambda operations, states: len(set(states) & {n for r, _ in operations for n in r})),
            "In one kernel you count one way only",
        ),
        (lambda operations, states: (moved()(operations, states)[0],) * 2, "Both results are those of one kernel per"),
        (lambda operations, states: (72, 28), "That is Adam's traffic whatever the"),
    ],
    "update-in-backward": [
        (sgd_by_hand, "parameters have no optimizer (weights and"),
        (hooked_on_modules, "The weights differ from those of a plain"),
        (steps_at_once, "No weight has moved: register a hook for"),
        (
            hooked(which=lambda model: [p for p in model.parameters() if p.dim() > 1]),
            "parameters have no optimizer (weights and",
        ),
        (
            hooked(act=lambda optimizer, p: (optimizer.step(), optimizer.step())),
            "Every parameter is updated twice per backward",
        ),
        (hooked(act=lambda optimizer, p: None), "No weight has moved: register a hook for"),
        (hooked(which=lambda model: list(model.parameters())[:1]), "parameters have no optimizer (weights and"),
        (
            hooked(act=lambda optimizer, p: optimizer.zero_grad(), free=lambda optimizer, p: optimizer.step()),
            "No weight has moved: register a hook for",
        ),
    ],
    "outer-step": [
        (outer(mean=lambda w: w), "You take the sum of the weights away from the"),
        (outer(velocity=lambda u, d, decay: u.add_(d)), "The momentum does not decay: u ← μ u + Δ."),
        (
            outer(velocity=lambda u, d, decay: u.mul_(decay).add_(d, alpha=1 - decay)),
            "− μ, as Adam does: here u ← μ u + Δ.",
        ),
        (
            outer(move=lambda anchor, d, u, rate, decay: anchor.sub_(rate * d)),
            "The momentum does not move the anchor: the",
        ),
        (
            outer(move=lambda anchor, d, u, rate, decay: anchor.sub_(d + decay * u)),
            "The rate is left out: θ ← θ − η (Δ + μ u).",
        ),
        (
            outer(move=lambda anchor, d, u, rate, decay: anchor.sub_(rate * (d + u))),
            "The momentum counts in full in the step: it",
        ),
        (outer_rebound, "Nothing has changed: `anchor = …` gives a"),
        (outer_gathered, "brought together to be added"),
    ],
}
