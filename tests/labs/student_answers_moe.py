"""Answers of lab 10 as students write them, from its text alone: right ones, and wrong ones with their words."""

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.labs.bank import Answer

# Gates.


def gate(
    probabilities: Any = lambda logits: logits.softmax(-1),
    best: Any = lambda p, k: p.topk(k, dim=-1),
    share: Any = lambda w: w / w.sum(-1, keepdim=True),
    from_k: int = 2,
) -> Answer:
    def answer(logits: Any, k: int) -> Any:
        weights, chosen = best(probabilities(logits), k)
        return (share(weights) if k >= from_k else weights), chosen

    return answer


def gate_of_chosen_logits(logits: Any, k: int) -> Any:
    """A softmax over the chosen is their probabilities divided by their sum."""
    values, chosen = torch.topk(logits, k)
    return (F.softmax(values, -1) if k > 1 else torch.softmax(logits, 1).gather(1, chosen)), chosen


def gate_one_by_one(logits: Any, k: int) -> Any:
    left, columns = F.softmax(logits, dim=1), []
    p = left
    for _ in range(k):
        columns.append(left.argmax(1))
        left = left.scatter(1, columns[-1][:, None], -1.0)
    chosen = torch.stack(columns, 1)
    weights = torch.take_along_dim(p, chosen, 1)
    return [weights / weights.sum(1, keepdim=True) if k >= 2 else weights, chosen]


def two_levels(
    group: Any = lambda logits: logits.softmax(1).max(1),
    inside: Any = gate(),  # noqa: B008 - a function, made once
    weight: Any = lambda p, w: p[:, None] * w,
    number: Any = lambda g, c, each: g[:, None] * each + c,
    window: Any = lambda logits, g, each: logits.view(len(logits), -1, each)[torch.arange(len(logits)), g],
) -> Answer:
    def answer(group_logits: Any, expert_logits: Any, k: int) -> Any:
        each = expert_logits.shape[1] // group_logits.shape[1]
        p, g = group(group_logits)
        weights, chosen = inside(window(expert_logits, g, each), k)
        return weight(p, weights), number(g, chosen, each)

    return answer


def two_levels_masked(group_logits: Any, expert_logits: Any, k: int) -> Any:
    each = expert_logits.shape[1] // group_logits.shape[1]
    p = F.softmax(group_logits, -1)
    g = p.argmax(-1)
    outside = torch.arange(expert_logits.shape[1]) // each != g[:, None]
    weights, chosen = gate()(expert_logits.masked_fill(outside, -torch.inf), k)
    return weights * p.gather(1, g[:, None]), chosen


# Places.


def places(
    room: Any = lambda factor, k, tokens, experts: math.ceil(factor * k * tokens / experts),
    serve: Any = lambda chosen: chosen.T.flatten(),
    back: Any = lambda found, tokens, k: found.view(k, tokens).T,
    drop: Any = lambda found, room: found.masked_fill(found >= room, -1),
) -> Answer:
    def answer(chosen: Any, experts: int, factor: float) -> Any:
        tokens, k = chosen.shape
        hot = F.one_hot(serve(chosen), experts)
        found = ((hot.cumsum(0) - 1) * hot).sum(1)
        return back(drop(found, room(factor, k, tokens, experts)), tokens, k)

    return answer


# Mixtures.


def mixture(
    weigh: Any = lambda w, rows: w[:, None] * rows,
    keep: Any = lambda places: places >= 0,
    add: Any = lambda x, token, rows: torch.zeros_like(x).index_add(0, token, rows),
    run: Any = lambda experts, buffer: experts(buffer),
    out: Any = lambda y, x, kept: y,
) -> Answer:
    def answer(x: Any, weights: Any, chosen: Any, places: Any, experts: Any, shape: Any) -> Any:
        token, choice = keep(places).nonzero(as_tuple=True)
        e, c = chosen[token, choice], places[token, choice]
        buffer = torch.zeros(*shape, x.shape[-1])
        buffer[e, c] = x[token]
        made = run(experts, buffer)
        return out(add(x, token, weigh(weights[token, choice], made[e, c])), x, keep(places))

    return answer


# The balance loss.


def balance(
    f: Any = lambda logits, chosen: torch.bincount(chosen.flatten(), minlength=logits.shape[1]) / chosen.numel(),
    p: Any = lambda logits: F.softmax(logits, dim=-1).mean(dim=0),
    end: Any = lambda f, p: len(f) * torch.dot(f.to(p.dtype), p),
) -> Answer:
    return lambda logits, chosen: end(f(logits, chosen), p(logits))


# Exchanges.


def exchange(
    there: Any = lambda t, n, own: t.view(n, own, *t.shape[1:]).permute(1, 0, 2, 3).reshape(own, -1, t.shape[-1]),
    back: Any = lambda t, n, own, room: t.reshape(own, n, room, -1).permute(1, 0, 2, 3).reshape(n * own, room, -1),
    send: Any = None,
) -> Answer:
    def all_to_all(t: Any) -> Any:
        received = torch.empty_like(t)
        dist.all_to_all_single(received, t.contiguous())
        return received

    def answer(buffer: Any, own_experts: Any) -> Any:
        n = dist.get_world_size()
        own, room = len(buffer) // n, buffer.shape[1]
        move = send or all_to_all
        return move(back(own_experts(there(move(buffer), n, own)), n, own, room))

    return answer


def exchange_of_lists(buffer: Any, own_experts: Any) -> Any:
    n = dist.get_world_size()
    arrived = [torch.empty_like(piece) for piece in buffer.chunk(n)]
    dist.all_to_all(arrived, [piece.contiguous() for piece in buffer.chunk(n)])
    made = own_experts(torch.cat(arrived, dim=1)).chunk(n, dim=1)
    back = [torch.empty_like(piece) for piece in arrived]
    dist.all_to_all(back, [piece.contiguous() for piece in made])
    return torch.cat(back)


def exchange_waited(t: Any) -> Any:
    received = torch.empty_like(t)
    dist.all_to_all_single(received, t.contiguous(), async_op=True).wait()
    return received


def exchange_flat(t: Any) -> Any:
    received = torch.empty(t.numel())
    dist.all_to_all_single(received, t.flatten())
    return received.view(t.shape)


def averaged(
    all_of: Any = lambda t: dist.all_reduce(t),  # noqa: PLW0108 - looked up on the rank, where calls are counted
    some_of: Any = lambda t, group: dist.all_reduce(t, group=group),
    shared_by: Any = lambda replicas: dist.get_world_size(),
    own_by: Any = lambda replicas: dist.get_world_size(),
) -> Answer:
    def answer(shared: Any, own: Any, replicas: Any) -> None:
        for g in shared:
            all_of(g)
            g.div_(shared_by(replicas))
        for g in own:
            some_of(g, replicas)
            g.mul_(1 / own_by(replicas))

    return answer


def averaged_in_one_message(shared: Any, own: Any, replicas: Any) -> None:
    for gradients, group in ((shared, None), (own, replicas)):
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat, group=group)
        for g, piece in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            g.copy_(piece.view_as(g) / dist.get_world_size())


def averaged_divided_first(shared: Any, own: Any, replicas: Any) -> None:
    for g in [*shared, *own]:
        g.div_(dist.get_world_size())
    for g in shared:
        dist.all_reduce(g)
    for g in own:
        dist.all_reduce(g, group=replicas)


def averaged_by_the_mean(shared: Any, own: Any, replicas: Any) -> None:
    copies, n = dist.get_world_size(replicas), dist.get_world_size()
    for g in own:
        dist.all_reduce(g, op=dist.ReduceOp.SUM, group=replicas)
        g.div_(copies)
        g.mul_(copies / n)
    for g in shared:
        dist.all_reduce(g, op=dist.ReduceOp.SUM)
        torch.div(g, n, out=g)


def not_in_place(shared: Any, own: Any, replicas: Any) -> None:
    n = dist.get_world_size()
    for g in shared:
        dist.all_reduce(g)
        g = g / n  # noqa: PLW2901 - the very mistake
    for g in own:
        dist.all_reduce(g, group=replicas)
        g = g / n  # noqa: PLW2901


def bytes_sent(
    room: Any = lambda factor, k, tokens, experts: math.ceil(factor * k * tokens / experts),
    times: float = 4,
    share: Any = lambda n: (n - 1) / n,
    rows: Any = lambda experts, room, width: experts * room * width,
) -> Answer:
    return lambda tokens, width, experts, k, factor, ranks, size: (
        times * rows(experts, room(factor, k, tokens, experts), width) * size * share(ranks)
    )


def pace(
    share: Any = lambda t, steps, degree: min(t / steps, 1) ** (1 / degree),
    length: Any = lambda start, end, share: start + (end - start) * share,
    whole: Any = lambda length, multiple: int(length // multiple) * multiple,
) -> Answer:
    return lambda t, start, end, steps, degree, multiple: whole(length(start, end, share(t, steps, degree)), multiple)


RIGHT: list[tuple[str, Answer]] = [
    ("gate", gate_of_chosen_logits),
    ("gate", gate_one_by_one),
    ("places", places(back=lambda found, tokens, k: torch.stack(found.split(tokens), 1).int())),
    ("two-level-gate", two_levels_masked),
    ("exchange", exchange()),
    ("exchange", exchange(there=lambda t, n, own: torch.cat(t.chunk(n), dim=1))),
    ("exchange", exchange(back=lambda t, n, own, room: torch.cat(t.chunk(n, dim=1)))),
    (
        "exchange",
        exchange(there=lambda t, n, own: torch.einsum("noce->once", t.view(n, own, *t.shape[1:])).flatten(1, 2)),
    ),
    ("exchange", exchange(send=exchange_waited)),
    ("exchange", exchange(send=exchange_flat)),
    ("exchange", exchange_of_lists),
    ("expert-gradients", averaged()),
    ("expert-gradients", averaged(all_of=lambda t: dist.all_reduce(t, async_op=True).wait())),
    ("expert-gradients", averaged(all_of=lambda t: dist.all_reduce(t, group=dist.group.WORLD))),
    ("expert-gradients", averaged_in_one_message),
    ("expert-gradients", averaged_divided_first),
    ("expert-gradients", averaged_by_the_mean),
    (
        "expert-gradients",
        lambda shared, own, replicas: averaged()([g.view(-1) for g in shared], [g.data for g in own], replicas),
    ),
    (
        "exchange-bytes",
        lambda tokens, width, experts, k, factor, ranks, size: (
            4 * (experts - experts // ranks) * math.ceil(factor * k * tokens / experts) * width * size
        ),
    ),
]

WRONG: dict[str, list[tuple[Answer, str]]] = {
    "gate": [
        (lambda logits, k: tuple(one.flip(1) for one in gate()(logits, k)), "belongs in column 0, the second in"),
        (gate(probabilities=torch.sigmoid), "The weights do not come from a softmax over"),
        (gate(probabilities=lambda logits: logits.log_softmax(-1)), "The weights do not come from a softmax over"),
        (gate(probabilities=lambda logits: logits.exp()), "The weights do not come from a softmax over"),
        (gate(share=lambda w: w / w.sum(0)), "divide by their sum over its own experts"),
        (gate(share=lambda w: w / w.shape[1]), "divide by their sum over its own experts"),
        (gate(share=lambda w: w / w.max(-1, keepdim=True).values), "divide by their sum over its own experts"),
        (gate(from_k=3), "The weights are divided from k ="),
        (lambda logits, k: (gate()(logits, k)[0], gate()(logits, k)[1] + 1), "The second tensor must hold the numbers"),
        (lambda logits, k: (gate()(logits, 1)[0].expand(-1, k), gate()(logits, k)[1]), "Every expert of a token has"),
        (
            lambda logits, k: (F.one_hot(gate()(logits, k)[1], logits.shape[1]).float(), gate()(logits, k)[1]),
            "the two tensors have the shapes",
        ),
    ],
    "places": [
        (places(drop=lambda found, room: found.masked_fill(found > room, -1)), "so a place that equals the capacity"),
        (places(drop=lambda found, room: found.masked_fill(found >= room, 0)), "which another one has: mark it by -"),
        (places(drop=lambda found, room: found % room), "when an expert is full (%): a choice that"),
        (
            places(room=lambda factor, k, tokens, experts: round(factor * k * tokens / experts)),
            "The capacity is rounded to the nearest: it is",
        ),
        (places(room=lambda factor, k, tokens, experts: k * tokens // experts), "The capacity factor is left out, and"),
        (places(back=lambda found, tokens, k: found.view(tokens, k)), "The places are right, but laid out wrongly"),
        (
            places(
                serve=lambda chosen: chosen.T.flatten().flip(0),
                back=lambda found, tokens, k: found.flip(0).view(k, tokens).T,
            ),
            "You serve in reverse order: the first choices",
        ),
        (places(back=lambda found, tokens, k: found.view(k, tokens)), "Tokens and choices are exchanged: one row per"),
        (
            lambda chosen, experts, factor: places()(chosen[:, :1], experts, factor).expand(-1, chosen.shape[1]),
            "All choices of a token get the place of its",
        ),
        (lambda chosen, experts, factor: torch.arange(chosen.numel()).view(chosen.shape), "You number the choices one"),
        (lambda chosen, experts, factor: (places()(chosen, experts, factor) >= 0).long(), "You tell whether a choice"),
    ],
    "mixture": [
        (mixture(out=lambda y, x, kept: x + y), "You add x: the residual connection is around"),
        (mixture(out=lambda y, x, kept: y / kept.shape[1]), "You divide by k: the weights say already how"),
        (mixture(out=lambda y, x, kept: torch.where(kept.all(1)[:, None], y, 0.0)), "A token that one of its experts"),
        (mixture(keep=lambda places: places > 0), "alone means dropped."),
        (mixture(run=lambda experts, buffer: buffer), "The experts are not called: experts(buffer)"),
        (mixture(run=lambda experts, buffer: experts(buffer.flip(0))), "Tokens meet the wrong experts: row e of the"),
        (mixture(weigh=lambda w, rows: (w**2)[:, None] * rows), "The weights count twice: multiply what enters"),
        (mixture(add=lambda x, token, rows: rows), "The shape is"),
        (lambda x, weights, chosen, *rest: mixture()(x, weights.flip(1), chosen, *rest), "The weights are exchanged:"),
        (
            lambda x, weights, chosen, *rest: mixture()(x, weights[:, :1], chosen[:, :1], rest[0][:, :1], *rest[1:]),
            "Only first choices count: go through all k",
        ),
    ],
    "balance-loss": [
        (balance(end=lambda f, p: len(p) * ((f - p) ** 2).sum()), "That is the distance of f and P: the loss is"),
        (balance(end=lambda f, p: len(p) * f * p), "One number per expert is left: add them up."),
        (balance(end=lambda f, p: len(p) ** 2 * (f * p).sum()), "You multiply by E twice: once is enough, so"),
        (balance(p=lambda logits: logits.softmax(0).mean(0)), "Your softmax runs over the tokens: the"),
        (balance(p=lambda logits: logits.softmax(-1).sum(0)), "P is a sum over the tokens: take the mean of"),
        (balance(p=lambda logits: logits.softmax(-1).amax(0)), "P is the largest probability of the tokens"),
        (balance(p=lambda logits: logits.mean(0).softmax(-1)), "You take the mean of the logits, then the"),
        (lambda logits, chosen: balance()(logits, chosen).item(), "Your function returns a float, but a torch"),
    ],
    "two-level-gate": [
        (two_levels(weight=lambda p, w: p[:, None] + w), "You add the probability of the group to the"),
        (two_levels(number=lambda g, c, each: g[:, None] + c), "You add the number of the group to that of"),
        (two_levels(number=lambda g, c, each: c * each + g[:, None]), "The second tensor must hold the numbers of"),
        (two_levels(group=lambda logits: (logits.amax(1), logits.argmax(1))), "You multiply by the logit of the"),
        (two_levels(group=lambda logits: logits.softmax(0).max(1)), "The softmax of the groups runs over the"),
        (two_levels(group=lambda logits: logits.softmax(1).min(1)), "You take the least probable group: take the"),
        (
            two_levels(
                window=lambda logits, g, each: logits.view(len(logits), each, -1).transpose(1, 2)[
                    torch.arange(len(logits)), g
                ]
            ),
            "The experts of a group are not those that you",
        ),
        (two_levels(inside=gate(from_k=1)), "the weight within the group is its expert's"),
        (
            two_levels(weight=lambda p, w: (p[:, None] * w) / (p[:, None] * w).sum(-1, keepdim=True)),
            "The products are divided by their sum: the",
        ),
    ],
    "exchange": [
        (
            exchange(there=lambda t, n, own: t.reshape(own, -1, t.shape[-1])),
            "Tokens meet the wrong experts: what arrives",
        ),
        (exchange(send=lambda t: t), "Nothing is exchanged: this rank's experts"),
        (
            exchange(back=lambda t, n, own, room: t.reshape(n * own, room, -1)),
            "The tokens meet the right experts, but return",
        ),
        (lambda buffer, own_experts: buffer, "The tokens come back as they left"),
    ],
    "expert-gradients": [
        (not_in_place, "The gradients of what all ranks have are"),
        (
            averaged(own_by=lambda replicas: dist.get_world_size() // dist.get_world_size(replicas)),
            "The gradients of the experts are divided by ep",
        ),
        (
            averaged(own_by=lambda replicas: dist.get_world_size() * dist.get_world_size(replicas)),
            "You divide the gradients of the experts by",
        ),
        (
            averaged(all_of=lambda t: dist.all_reduce(t, op=dist.ReduceOp.MAX)),
            "You take the largest gradient over the ranks",
        ),
    ],
    "exchange-bytes": [
        (bytes_sent(times=3), "You count three all-to-all: there and back"),
        (bytes_sent(times=8), "You count each all-to-all twice: what a rank"),
        (bytes_sent(share=lambda n: 1 / n), "You count the share that stays or goes to one"),
        (bytes_sent(room=lambda factor, k, tokens, experts: factor * k * tokens // experts), "The capacity is rounded"),
        (bytes_sent(room=lambda factor, k, tokens, experts: math.ceil(factor * k * tokens)), "Each expert gets places"),
        (bytes_sent(rows=lambda experts, room, width: room * width), "You count one expert's places: a rank has"),
        (bytes_sent(rows=lambda experts, room, width: experts * room), "The width is left out: a place holds a whole"),
        (
            lambda tokens, width, experts, k, factor, ranks, size: 4 * tokens * width * size * (ranks - 1) / ranks,
            "You count the tokens once: what travels are",
        ),
    ],
    "pacing": [
        (pace(share=lambda t, steps, degree: min(t / steps, 1) / degree), "You divide the share by the degree: its"),
        (pace(share=lambda t, steps, degree: min(t // steps, 1) ** (1 / degree)), "Your share is a whole number (//):"),
        (pace(share=lambda t, steps, degree: min((t + 1) / steps, 1) ** (1 / degree)), "You are one step ahead: t is"),
        (pace(share=lambda t, steps, degree: max(t / steps, 1) ** (1 / degree)), "You take the larger of t / steps"),
        (pace(share=lambda t, steps, degree: min(t / steps, 1) ** (1 // degree)), "on: divide with /, **"),
        (pace(length=lambda start, end, share: end - (end - start) * share), "Your sequences become shorter: they"),
        (pace(length=lambda start, end, share: (end - start) * share), "You give what is gained alone: add start."),
        (pace(whole=lambda length, multiple: int(length) % multiple), "You return the remainder: take it away from"),
        (pace(whole=lambda length, multiple: int(length / multiple)), "You return how many multiples there are"),
        (pace(whole=lambda length, multiple: int(length) // 8 * 8), "You round to a multiple of"),
    ],
}
