"""Answers of lab 11 as students write them, from its text alone: right ones, and wrong ones with their words."""

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tests.labs.bank import Answer

# Distillation.


def soft(
    p: Any = lambda t: t.softmax(-1),
    teacher: Any = lambda t: t.detach(),
    mean: Any = lambda terms: terms.sum() / len(terms),
    factor: Any = lambda t: t**2,
    term: Any = lambda p, q: p * (p.log() - q.log()),
) -> Answer:
    return lambda s, t, temperature: factor(temperature) * mean(term(p(teacher(t) / temperature), p(s / temperature)))


def soft_by_distribution(student: Any, teacher: Any, temperature: float) -> Any:
    p, q = (torch.distributions.Categorical(logits=one / temperature) for one in (teacher.detach(), student))
    return temperature**2 * torch.distributions.kl_divergence(p, q).mean()


def hard(student: Any, labels: Any) -> Any:
    known = labels != -1
    return F.cross_entropy(student[known], labels[known]) if known.any() else 0.0


def mixed(
    soft_loss: Any = soft(),  # noqa: B008 - a function, made once
    hard_loss: Any = hard,
    mix: Any = lambda alpha, a, b: alpha * a + (1 - alpha) * b,
) -> Answer:
    return lambda s, t, labels, temperature, alpha: mix(alpha, soft_loss(s, t, temperature), hard_loss(s, labels))


# Quantization.


def rows(
    high: Any = lambda bits: 2 ** (bits - 1) - 1,
    largest: Any = lambda w: w.abs().amax(1, keepdim=True),
    whole: Any = torch.round,
    kept: Any = lambda q: q.to(torch.int8),
    scales: Any = lambda scale: scale,
) -> Answer:
    def answer(weight: Any, bits: int) -> Any:
        scale = largest(weight) / high(bits)
        return kept(whole(weight / scale)), scales(scale)

    return answer


def affine(
    scale: Any = lambda low, high, bits: (high - low) / (2**bits - 1),
    zero: Any = lambda low, scale, bits: -(2 ** (bits - 1)) - round(low / scale),
    whole: Any = lambda x, scale, zero: torch.round(x / scale) + zero,
    clamped: Any = lambda q, bits: torch.clamp(q, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1),
    kept: Any = lambda q: q.to(torch.int8),
) -> Answer:
    def answer(x: Any, low: float, high: float, bits: int) -> Any:
        step = scale(low, high, bits)
        shift = zero(low, step, bits)
        return kept(clamped(whole(x, step, shift), bits)), step, shift

    return answer


def affine_in_place(x: Any, low: float, high: float, bits: int) -> Any:
    _, scale, zero = affine()(x, low, high, bits)
    return x.div_(scale).round_().add_(zero).clamp_(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).char(), scale, zero


def integer(
    sums: Any = lambda x, w: x.int() @ w.int().T,
    shift: Any = lambda x, w, z: z * w.int().sum(1),
    scales: Any = lambda y, sx, sw: sx * sw.T * y,
) -> Answer:
    return lambda x_q, sx, z, w_q, sw: scales(sums(x_q, w_q) - shift(x_q, w_q, z), sx, sw)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return torch.round(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient.clone()


class Doubled(Straight):
    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return 2 * gradient


class Rounded(Straight):
    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient.round()


def fake(
    through: Any = Straight.apply,
    low: Any = lambda high: -high,
    high: Any = lambda bits: 2 ** (bits - 1) - 1,
    clamp: Any = lambda x, low, high: x.clamp(low, high),
    back: Any = lambda q, scale: q * scale,
) -> Answer:
    return lambda w, scale, bits: back(clamp(through(w / scale), low(high(bits)), high(bits)), scale)


# Pruning.


def masks_by_kthvalue(weights: Any, sparsity: float) -> Any:
    sizes = torch.cat([w.flatten().abs() for w in weights])
    gone = round(sparsity * sizes.numel())
    if gone == 0:
        return [torch.ones_like(w) for w in weights]
    limit = sizes.kthvalue(gone).values
    return [(w.abs() > limit).to(w.dtype) for w in weights]


def masks(
    sizes: Any = lambda w: w.abs(),
    gone: Any = lambda sparsity, n: round(sparsity * n),
    mask: Any = lambda keep: keep.float(),
    descending: bool = False,
    held: Any = list,
) -> Answer:
    def answer(weights: Any, sparsity: float) -> Any:
        flat = torch.hstack([sizes(w).ravel() for w in weights])
        keep = torch.ones(len(flat), dtype=torch.bool)
        keep[torch.argsort(flat, descending=descending)[: gone(sparsity, len(flat))]] = False
        found, start = [], 0
        for w in weights:
            found.append(mask(keep[start : start + w.numel()].reshape(w.shape)))
            start += w.numel()
        return held(found)

    return answer


def masks_in_a_list(weights: Any, sparsity: float) -> Any:
    places = sorted(((abs(v), layer, i) for layer, w in enumerate(weights) for i, v in enumerate(w.flatten().tolist())))
    found = [torch.ones(w.numel()) for w in weights]
    for _, layer, i in places[: round(sparsity * len(places))]:
        found[layer][i] = 0.0
    return [m.view(w.shape) for m, w in zip(found, weights, strict=True)]


def masks_by_quantile(weights: Any, sparsity: float) -> Any:
    limit = torch.quantile(torch.cat([w.abs().flatten() for w in weights]), sparsity)
    return [(w.abs() >= limit).float() for w in weights]


def ticket(
    judged: Any = lambda start, trained: trained.abs(),
    count: Any = lambda rate, mask: round(rate * int(mask.sum())),
    end: Any = lambda start, trained, new: start * new,
    kind: Any = lambda new: new,
    largest: bool = False,
) -> Answer:
    def answer(start: Any, trained: Any, mask: Any, rate: float) -> Any:
        new = mask.clone().reshape(-1)
        there = new.nonzero().squeeze(1)
        order = judged(start, trained).reshape(-1)[there].argsort(descending=largest)
        new[there[order[: count(rate, mask)]]] = 0
        new = kind(new.reshape(mask.shape))
        return new, end(start, trained, new)

    return answer


def ticket_by_infinity(start: Any, trained: Any, mask: Any, rate: float) -> Any:
    sizes = trained.abs().masked_fill(mask == 0, float("inf"))
    gone = sizes.flatten().topk(round(rate * mask.sum().item()), largest=False).indices
    new = mask.flatten().index_fill(0, gone, 0.0).view_as(mask)
    return new, torch.where(new > 0, start, torch.zeros_like(start))


def ticket_in_place(start: Any, trained: Any, mask: Any, rate: float) -> Any:
    new, weights = ticket()(start, trained, mask, rate)
    mask.copy_(new)
    return mask, weights


def pairs(
    groups: Any = lambda w: w.abs().view(len(w), -1, 4),
    best: Any = lambda g: g.topk(2, dim=-1).indices,
    kind: Any = lambda m: m,
) -> Answer:
    def answer(weight: Any) -> Any:
        size = groups(weight)
        return kind(torch.zeros(size.shape).scatter_(-1, best(size), 1.0).view(weight.shape))

    return answer


def pairs_by_comparing(weight: Any) -> Any:
    g = weight.abs().reshape(-1, 4)
    beaten = torch.zeros_like(g)
    for a in range(4):
        for b in range(4):
            beaten[:, a] += (g[:, b] > g[:, a]) | ((g[:, b] == g[:, a]) & torch.tensor(b < a))
    return (beaten < 2).reshape(weight.shape)


def moved(first: Any, second: Any) -> Answer:
    return lambda expand, bias, project, order: (first(expand, order), first(bias, order), second(project, order))


def moved_in_place(expand: Any, bias: Any, project: Any, order: Any) -> Any:
    expand[:], bias[:], project[:] = expand[order], bias[order], project[:, order]
    return expand, bias, project


RIGHT: list[tuple[str, Answer]] = [
    ("soft-loss", soft_by_distribution),
    ("mixed-loss", mixed()),
    ("affine", affine(zero=lambda low, scale, bits: float(-(2 ** (bits - 1)) - round(low / scale)))),
    ("affine", affine(scale=lambda low, high, bits: np.float64(high - low) / (2**bits - 1))),
    ("affine", affine_in_place),
    ("integer-linear", integer(scales=lambda y, sx, sw: y.float().mul_(sw.squeeze(1)).mul_(sx))),
    ("straight-through", fake()),
    ("global-masks", masks(mask=lambda keep: keep)),
    ("global-masks", masks(mask=lambda keep: keep.long(), held=tuple)),
    ("global-masks", masks(mask=lambda keep: keep.to(torch.uint8))),
    ("global-masks", masks_in_a_list),
    ("ticket", ticket(kind=lambda new: new.bool())),
    ("ticket", ticket_by_infinity),
    ("ticket", ticket_in_place),
    ("two-of-four", pairs(kind=lambda m: m.bool())),
    ("two-of-four", pairs(groups=lambda w: (w * w).reshape(-1, 4), kind=lambda m: m.int())),
    ("two-of-four", pairs_by_comparing),
    ("sr-ste", lambda w, m, g, d: torch.addcmul(g, 1 - m, w, value=d)),
    ("sr-ste", lambda w, m, g, d: g.add_(d * (w - w * m))),
    ("permutation", lambda e, b, p, order: [e[order, :], torch.gather(b, 0, order), p[..., order]]),
    ("permutation", moved_in_place),
]

WRONG: dict[str, list[tuple[Answer, str]]] = {
    "soft-loss": [
        (soft(factor=lambda t: 1 / t**2), "You divide by T²: the factor T² makes up for"),
        (soft(factor=lambda t: 2 * t), "T; the factor is T², temperature**"),
        (soft(p=lambda t: t.softmax(0)), "): the probabilities of one sample must add"),
        (soft(term=lambda p, q: (p - q) ** 2), "That is the square difference of the"),
        (soft(mean=lambda terms: terms.sum(1)), "One loss per sample is left: take their mean."),
        (soft(mean=lambda terms: -terms.sum() / len(terms)), "The sign is the other way round: a divergence"),
        (
            lambda s, t, temperature: (
                temperature**2
                * F.kl_div((s / temperature).softmax(-1), (t.detach() / temperature).softmax(-1), reduction="batchmean")
            ),
            "F.kl_div takes the student's logarithms",
        ),
    ],
    "mixed-loss": [
        (mixed(mix=lambda alpha, a, b: a + b), "Neither loss is weighed: alpha times the soft"),
        (mixed(mix=lambda alpha, a, b: (a + b) / 2), "You take the plain mean of the two losses"),
        (mixed(mix=lambda alpha, a, b: alpha * a), "− alpha) × the cross-entropy of the samples"),
        (
            mixed(
                hard_loss=lambda s, labels: (
                    F.cross_entropy(s[labels > 0], labels[labels > 0]) if (labels > 0).any() else 0.0
                )
            ),
            "are left out: a label is unknown if it is -",
        ),
        (
            mixed(hard_loss=lambda s, labels: F.cross_entropy(s[labels >= 0], labels[labels >= 0], reduction="sum")),
            "The cross-entropy is a sum over the samples",
        ),
        (mixed(soft_loss=lambda s, t, temperature: soft()(s, t, 1.0)), "The soft loss takes no temperature here: hand"),
        (mixed(soft_loss=soft(factor=lambda t: 1)), "The soft loss lacks its factor T²: it is that"),
        (
            mixed(
                hard_loss=lambda s, labels: (
                    F.nll_loss(s[labels >= 0], labels[labels >= 0]) if (labels >= 0).any() else 0.0
                )
            ),
            "F.nll_loss takes log-probabilities: call",
        ),
        (
            lambda s, t, labels, temperature, alpha: (
                mixed()(s, t, labels, temperature, alpha) if (labels >= 0).any() else torch.zeros(())
            ),
            "With some labels unknown you are right",
        ),
    ],
    "rows": [
        (rows(largest=lambda w: w.abs().mean(1, keepdim=True)), "Your scale does not come from the largest"),
        (rows(largest=lambda w: w.abs().sum(1, keepdim=True)), "Your scale does not come from the largest"),
        (rows(largest=lambda w: w.amax(1, keepdim=True) - w.amin(1, keepdim=True)), "Your scale does not come from"),
        (rows(whole=torch.ceil), "You round up, which shifts all weights the"),
        (rows(high=lambda bits: 2**bits), "^bits: half of the whole numbers are"),
        (rows(high=lambda bits: bits), "You divide by the number of bits: the largest"),
        (rows(kept=lambda q: q.int()), "so it saves nothing, or less than it could"),
        (lambda w, bits: rows()(w, bits)[::-1], "q has the shape"),
        (lambda w, bits: ((rows()(w, bits)[0] * rows()(w, bits)[1]), rows()(w, bits)[1]), "so it saves nothing, or"),
    ],
    "affine": [
        (affine(zero=lambda low, scale, bits: -round(low / scale)), "): shift the zero-point by as much."),
        (affine(zero=lambda low, scale, bits: 0), ") − round(low / scale), so that low becomes"),
        (affine(zero=lambda low, scale, bits: -(2 ** (bits - 1)) - math.floor(low / scale)), "zero-point down: round"),
        (affine(whole=lambda x, scale, zero: torch.round((x - zero) / scale)), "You take the zero-point away from x:"),
        (affine(whole=lambda x, scale, zero: torch.round(x / scale)), "The zero-point is never added to the whole"),
        (
            affine(clamped=lambda q, bits: q.clamp(-(2 ** (bits - 1)) + 1, 2 ** (bits - 1) - 1)),
            "here the smallest whole number, −",
        ),
        (affine(clamped=lambda q, bits: q.clamp(-128, 127)), "whatever bits is: with"),
        (affine(scale=lambda low, high, bits: high / (2**bits - 1)), "Your scale leaves out a part of the range: it"),
        (affine(scale=lambda low, high, bits: (high - low) / (2 ** (bits - 1) - 1)), "half of the whole numbers: it"),
        (affine(kept=lambda q: q), "so it saves nothing, or less than it could"),
        (lambda x, low, high, bits: affine()(x, low, high, 8), "bits whatever bits is: with"),
        (
            lambda x, low, high, bits: (affine()(x, low, high, bits)[0], *affine()(x, low, high, bits)[:0:-1]),
            "scale and zero_point are swapped: return q",
        ),
    ],
    "integer-linear": [
        (integer(scales=lambda y, sx, sw: y), "The sums are right, but no scale is applied"),
        (integer(scales=lambda y, sx, sw: sx * y / sw.T), "You divide by w_scale: a weight is worth"),
        (integer(shift=lambda x, w, z: z * w.sum(1, dtype=torch.int8)), "The sum of the weights runs over, kept in"),
        (integer(shift=lambda x, w, z: z * w.shape[1]), "The correction counts the inputs; each counts"),
        (integer(shift=lambda x, w, z: z * w.int().sum()), "The correction adds up all weights of the"),
        (integer(scales=lambda y, sx, sw: (sx * sw.T * y).round()), "You round the output: it is a number in"),
        (integer(scales=lambda y, sx, sw: (sx * sw.T * y).T), "y has the shape"),
        (lambda x_q, sx, z, w_q, sw: sx * sw.T * ((x_q - z).int() @ w_q.int().T), "multiply x_q as it is, and take"),
    ],
    "straight-through": [
        (fake(through=Doubled.apply), "The values are right, but the gradient is not"),
        (fake(through=Rounded.apply), "The values are right, but backward rounds the"),
        (fake(through=torch.floor), "You round down, and without Round.apply: no"),
        (fake(low=lambda high: -high - 1), "You clamp at other ends: whole numbers go"),
        (fake(low=lambda high: 0), "You clamp at other ends: whole numbers go"),
        (fake(high=lambda bits: 2**bits - 1), "You clamp at other ends: whole numbers go"),
        (fake(back=lambda q, scale: q / scale), "You divide by the scale at the end: it has"),
        (
            lambda w, scale, bits: Straight.apply(w).clamp(-(2 ** (bits - 1)) + 1, 2 ** (bits - 1) - 1) * scale,
            "You round the weights themselves: divide by",
        ),
    ],
    "global-masks": [
        (masks(gone=lambda sparsity, n: int(sparsity * n)), "The choice is right, but not the number"),
        (masks(gone=lambda sparsity, n: round(sparsity * n) + 1), "The choice is right, but not the number"),
        (masks(gone=lambda sparsity, n: math.ceil(sparsity * n)), "The choice is right, but not the number"),
        (masks(gone=lambda sparsity, n: n - round(sparsity * n)), "The sparsity is the share that goes; you keep"),
        (masks(held=lambda found: found[::-1]), "has the shape"),
        (masks(mask=lambda keep: keep.flatten()), "has the shape"),
        (masks(mask=lambda keep: (~keep).float()), "is for what stays, since the mask multiplies"),
        (masks(sizes=lambda w: w.abs() / w.abs().max()), "You measure each layer's weights by its"),
        (masks(sizes=lambda w: -w), "You remove the most positive weights: it is"),
        (masks(held=lambda found: torch.cat([m.flatten() for m in found])), "results are expected, [mask, mask,"),
        (masks_by_quantile, "The choice is right, but not the number"),
        (masks_by_kthvalue, "a threshold takes all that have its magnitude"),
    ],
    "ticket": [
        (ticket(count=lambda rate, mask: int(rate * mask.sum())), "The choice is right, but not the number"),
        (ticket(count=lambda rate, mask: int(mask.sum()) - round(rate * int(mask.sum()))), "You keep `rate` of what"),
        (ticket(judged=lambda start, trained: trained), "You remove the most negative weights: it is"),
        (ticket(judged=lambda start, trained: (trained - start).abs()), "You compare how far weights have moved: here"),
        (ticket(end=lambda start, trained, new: start[new > 0]), "The tensor of weights has the shape"),
        (ticket(kind=lambda new: 1 - new), "where a weight goes"),
        (lambda start, trained, mask, rate: (mask, start * mask), "Nothing more is removed: return a new mask"),
        (lambda start, trained, mask, rate: ticket()(start, trained, mask, rate)[::-1], "a mask says which weights"),
    ],
    "two-of-four": [
        (pairs(best=lambda g: g.topk(3, dim=-1).indices), "You do not keep two weights of each group"),
        (pairs(best=lambda g: g.topk(1, dim=-1).indices), "You do not keep two weights of each group"),
        (pairs(groups=lambda w: w.abs().T.reshape(-1, 4)), "Your groups follow the transposed matrix"),
        (pairs(groups=lambda w: w.view(len(w), -1, 4)), "You compare the weights with their signs: a"),
        (lambda w: (w.abs() >= w.abs().median()).float(), "You compare all weights with one threshold"),
        (lambda w: torch.tensor([1.0, 1.0, 0.0, 0.0]).repeat(w.numel() // 4).view_as(w), "keep the same two places of"),
        (lambda w: pairs()(w).view(len(w), -1, 4), "The mask has the shape"),
    ],
    "sr-ste": [
        (lambda w, m, g, d: g + (1 - m) * w, "The decay is left out: add decay *"),
        (lambda w, m, g, d: g + d * (1 - m), "What is added does not depend on the weight"),
        (lambda w, m, g, d: g * (1 - m) + d * (1 - m) * w, "Weights that are kept get no gradient: the"),
        (lambda w, m, g, d: g + d * (1 - m) * g, "You add decay times the gradient: it is the"),
        (lambda w, m, g, d: g + d * (1 - m) * w.abs(), "The pull is not towards zero, or not"),
        (lambda w, m, g, d: g + d * (1 - m) * w.sign(), "The pull is not towards zero, or not"),
        (lambda w, m, g, d: g, "That is the straight-through estimator alone"),
        (lambda w, m, g, d: w - (g + d * (1 - m) * w), "You make the step yourself: return the"),
    ],
    "permutation": [
        (lambda e, b, p, order: (e[order], b[order], p), "The second layer still reads the units in"),
        (
            lambda e, b, p, order: (e[:, order] if e.shape[0] == e.shape[1] else e, b[order], p[:, order]),
            "The first layer is not moved by its hidden",
        ),
        (lambda e, b, p, order: (e[order], b[order.argsort()], p[:, order]), "The bias is moved by the inverse order"),
        (lambda e, b, p, order: (e[order], b[order], p[:, order].T), "project has the shape"),
        (lambda e, b, p, order: (e.sort(0).values, b.sort().values, p[:, order]), "You sort the values; it is whole"),
        (lambda e, b, p, order: (e[order], p[:, order], b[order]), "bias has the shape"),
        (lambda e, b, p, order: (e.flip(0), b.flip(0), p.flip(1)), "You reverse the order of the units, whatever"),
        (lambda e, b, p, order: (e[order[order]], b[order[order]], p[:, order[order]]), "The order is applied twice:"),
    ],
}
