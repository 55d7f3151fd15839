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


def soft_sample_by_sample(student: Any, teacher: Any, temperature: float) -> Any:
    loss = torch.zeros(())
    for s, t in zip(student / temperature, teacher.detach() / temperature, strict=True):
        p, log_p, log_q = F.softmax(t, 0), F.log_softmax(t, 0), F.log_softmax(s, 0)
        for c in range(len(p)):
            loss = loss + p[c] * (log_p[c] - log_q[c])
    return loss * temperature * temperature / student.shape[0]


def soft_by_module(student: Any, teacher: Any, temperature: float) -> Any:
    with torch.no_grad():
        target = F.log_softmax(teacher / temperature, dim=-1)
    distance = torch.nn.KLDivLoss(reduction="batchmean", log_target=True)
    return distance(F.log_softmax(student / temperature, dim=-1), target) * (temperature**2)


def soft_by_distribution(student: Any, teacher: Any, temperature: float) -> Any:
    p, q = (torch.distributions.Categorical(logits=one / temperature) for one in (teacher.detach(), student))
    return temperature**2 * torch.distributions.kl_divergence(p, q).mean()


def soft_by_cross_entropy(student: Any, teacher: Any, temperature: float) -> Any:
    p = (teacher.detach() / temperature).softmax(1)
    entropy = -(p * p.log()).sum(1).mean()
    return temperature**2 * (F.cross_entropy(student / temperature, p) - entropy)


def hard(student: Any, labels: Any) -> Any:
    known = labels != -1
    return F.cross_entropy(student[known], labels[known]) if known.any() else 0.0


def mixed(
    soft_loss: Any = soft(),  # noqa: B008 - a function, made once
    hard_loss: Any = hard,
    mix: Any = lambda alpha, a, b: alpha * a + (1 - alpha) * b,
) -> Answer:
    return lambda s, t, labels, temperature, alpha: mix(alpha, soft_loss(s, t, temperature), hard_loss(s, labels))


def hard_by_hand(student: Any, labels: Any) -> Any:
    terms = [-F.log_softmax(row, 0)[label] for row, label in zip(student, labels.tolist(), strict=True) if label >= 0]
    return torch.stack(terms).mean() if terms else torch.zeros(())


def hard_by_gather(student: Any, labels: Any) -> Any:
    places = torch.nonzero(labels >= 0).squeeze(1)
    if len(places) == 0:
        return student.sum() * 0
    return -student.log_softmax(-1)[places].gather(1, labels[places, None]).mean()


def hard_ignored(student: Any, labels: Any) -> Any:
    total = F.cross_entropy(student, labels, ignore_index=-1, reduction="sum")
    return total / (labels != -1).sum().clamp(min=1)


def hard_weighted(student: Any, labels: Any) -> Any:
    known = (labels != -1).float()
    each = F.cross_entropy(student, labels.clamp(min=0), reduction="none")
    return (each * known).sum() / max(known.sum().item(), 1)


def hard_by_nan(student: Any, labels: Any) -> Any:
    return torch.nan_to_num(F.cross_entropy(student, labels, ignore_index=-1))


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


def rows_one_by_one(weight: Any, bits: int) -> Any:
    high = (1 << (bits - 1)) - 1
    q, scales = [], []
    for row in weight:
        scale = max(row.max(), -row.min()) / high
        q.append((row / scale).round())
        scales.append([scale])
    return torch.stack(q).char(), torch.tensor(scales)


def rows_by_numpy(weight: Any, bits: int) -> Any:
    w = weight.detach().numpy()
    scale = np.abs(w).max(axis=1, keepdims=True) / np.float32(2 ** (bits - 1) - 1)
    return torch.from_numpy(np.rint(w / scale).astype(np.int8)), torch.from_numpy(scale)


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


def affine_element_by_element(x: Any, low: float, high: float, bits: int) -> Any:
    smallest, largest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    scale = (high - low) / (largest - smallest)
    zero = smallest - round(low / scale)
    q = [max(smallest, min(largest, round(one / scale) + zero)) for one in x.flatten().tolist()]
    return torch.tensor(q, dtype=torch.int8).view(x.shape), scale, zero


def affine_in_place(x: Any, low: float, high: float, bits: int) -> Any:
    _, scale, zero = affine()(x, low, high, bits)
    return x.div_(scale).round_().add_(zero).clamp_(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).char(), scale, zero


def integer(
    sums: Any = lambda x, w: x.int() @ w.int().T,
    shift: Any = lambda x, w, z: z * w.int().sum(1),
    scales: Any = lambda y, sx, sw: sx * sw.T * y,
) -> Answer:
    return lambda x_q, sx, z, w_q, sw: scales(sums(x_q, w_q) - shift(x_q, w_q, z), sx, sw)


def integer_by_hand(x_q: Any, x_scale: float, x_zero: int, w_q: Any, w_scale: Any) -> Any:
    out = torch.zeros(len(x_q), len(w_q))
    for i, row in enumerate(x_q.tolist()):
        for j, weights in enumerate(w_q.tolist()):
            total = sum(a * b for a, b in zip(row, weights, strict=True)) - x_zero * sum(weights)
            out[i, j] = x_scale * w_scale[j, 0] * total
    return out


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


class Stopped(Straight):
    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return torch.zeros_like(gradient)


class Rounded(Straight):
    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient.round()


def detached_rounding(x: Any) -> Any:
    return x + (x.round() - x).detach()


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


def ticket_by_threshold(start: Any, trained: Any, mask: Any, rate: float) -> Any:
    left = trained[mask.bool()].abs().sort().values
    gone = round(rate * len(left))
    limit = left[gone] if gone < len(left) else torch.inf
    new = ((trained.abs() >= limit) & mask.bool()).float()
    return new, start.mul(new)


def pairs_by_sort(weight: Any) -> Any:
    groups = weight.abs().reshape(-1, 4)
    ranks = groups.argsort(1, descending=True).argsort(1)
    return (ranks < 2).float().reshape(weight.shape)


def pairs(
    groups: Any = lambda w: w.abs().view(len(w), -1, 4),
    best: Any = lambda g: g.topk(2, dim=-1).indices,
    kind: Any = lambda m: m,
) -> Answer:
    def answer(weight: Any) -> Any:
        size = groups(weight)
        return kind(torch.zeros(size.shape).scatter_(-1, best(size), 1.0).view(weight.shape))

    return answer


def pairs_in_loops(weight: Any) -> Any:
    mask = torch.zeros_like(weight)
    for i, row in enumerate(weight.abs().tolist()):
        for first in range(0, len(row), 4):
            group = range(first, first + 4)
            for j in sorted(group, key=lambda j: row[j], reverse=True)[:2]:
                mask[i, j] = 1
    return mask


def pairs_without_the_smallest(weight: Any) -> Any:
    groups = weight.abs().unflatten(-1, (-1, 4))
    return torch.ones_like(groups).scatter(-1, groups.argsort(-1)[..., :2], 0.0).flatten(-2)


def pairs_by_comparing(weight: Any) -> Any:
    g = weight.abs().reshape(-1, 4)
    beaten = torch.zeros_like(g)
    for a in range(4):
        for b in range(4):
            beaten[:, a] += (g[:, b] > g[:, a]) | ((g[:, b] == g[:, a]) & torch.tensor(b < a))
    return (beaten < 2).reshape(weight.shape)


def moved(first: Any, second: Any) -> Answer:
    return lambda expand, bias, project, order: (first(expand, order), first(bias, order), second(project, order))


def moved_by_matrix(expand: Any, bias: Any, project: Any, order: Any) -> Any:
    p = torch.eye(len(order))[order]
    return p @ expand, p @ bias, project @ p.T


def moved_into_place(expand: Any, bias: Any, project: Any, order: Any) -> Any:
    out = torch.empty_like(expand), torch.empty_like(bias), torch.empty_like(project)
    for i, unit in enumerate(order.tolist()):
        out[0][i], out[1][i], out[2][:, i] = expand[unit], bias[unit], project[:, unit]
    return out


def moved_in_place(expand: Any, bias: Any, project: Any, order: Any) -> Any:
    expand[:], bias[:], project[:] = expand[order], bias[order], project[:, order]
    return expand, bias, project


RIGHT: list[tuple[str, Answer]] = [
    ("soft-loss", soft()),
    ("soft-loss", soft(mean=lambda terms: terms.sum(-1).mean())),
    ("soft-loss", soft(p=lambda t: t.exp() / t.exp().sum(1, keepdim=True), factor=lambda t: t * t)),
    ("soft-loss", soft(teacher=lambda t: t.clone().detach(), term=lambda p, q: p * torch.log(p / q))),
    ("soft-loss", soft_sample_by_sample),
    ("soft-loss", soft_by_module),
    ("soft-loss", soft_by_distribution),
    ("soft-loss", soft_by_cross_entropy),
    ("mixed-loss", mixed()),
    ("mixed-loss", mixed(hard_loss=hard_by_hand)),
    ("mixed-loss", mixed(hard_loss=hard_by_gather)),
    ("mixed-loss", mixed(hard_loss=hard_ignored)),
    ("mixed-loss", mixed(hard_loss=hard_weighted)),
    ("mixed-loss", mixed(hard_loss=hard_by_nan)),
    ("mixed-loss", mixed(soft_loss=soft_by_module)),
    ("mixed-loss", mixed(mix=lambda alpha, a, b: b + alpha * (a - b))),
    ("rows", rows()),
    ("rows", rows(largest=lambda w: w.abs().max(-1)[0].unsqueeze(-1), kept=lambda q: q.char())),
    ("rows", rows(largest=lambda w: torch.linalg.vector_norm(w, torch.inf, dim=1, keepdim=True))),
    ("rows", rows(largest=lambda w: torch.maximum(w.amax(1), -w.amin(1))[:, None])),
    ("rows", rows(kept=lambda q: q.clamp(-127, 127).type(torch.int8))),
    ("rows", rows(high=lambda bits: float(2**bits // 2 - 1))),
    ("rows", rows_one_by_one),
    ("rows", rows_by_numpy),
    ("affine", affine()),
    ("affine", affine(kept=lambda q: q.char(), clamped=lambda q, bits: q.clip(-(2**bits) // 2, 2**bits // 2 - 1))),
    ("affine", affine(whole=lambda x, scale, zero: (x / scale).round().int() + zero)),
    ("affine", affine(zero=lambda low, scale, bits: int(-(2 ** (bits - 1)) - round(low / scale)))),
    ("affine", affine(zero=lambda low, scale, bits: float(-(2 ** (bits - 1)) - round(low / scale)))),
    ("affine", affine(scale=lambda low, high, bits: np.float64(high - low) / (2**bits - 1))),
    ("affine", affine_element_by_element),
    ("affine", affine_in_place),
    ("integer-linear", integer()),
    ("integer-linear", integer(sums=lambda x, w: torch.einsum("bi,oi->bo", x.to(torch.int32), w.to(torch.int32)))),
    ("integer-linear", integer(sums=lambda x, w: x.long() @ w.long().T)),
    ("integer-linear", integer(sums=lambda x, w: (x.int()[:, None] * w.int()).sum(-1))),
    ("integer-linear", integer(shift=lambda x, w, z: z * w.sum(1, dtype=torch.int32)[None])),
    ("integer-linear", integer(shift=lambda x, w, z: torch.full_like(x.int(), z) @ w.int().T)),
    ("integer-linear", integer(scales=lambda y, sx, sw: y.float().mul_(sw.squeeze(1)).mul_(sx))),
    ("integer-linear", integer_by_hand),
    ("straight-through", fake()),
    ("straight-through", fake(through=detached_rounding)),
    ("straight-through", fake(clamp=torch.clamp)),
    ("straight-through", fake(clamp=lambda x, low, high: x.clamp(min=low).clamp(max=high))),
    (
        "straight-through",
        fake(clamp=torch.clip, through=lambda x: Straight.apply(x).clone()),
    ),
    ("straight-through", fake(back=lambda q, scale: scale.mul(q))),
    ("straight-through", fake(high=lambda bits: (1 << (bits - 1)) - 1.0)),
    ("straight-through", fake(through=lambda x: x - (x - x.round()).detach())),
    ("global-masks", masks()),
    ("global-masks", masks(mask=lambda keep: keep)),
    ("global-masks", masks(mask=lambda keep: keep.long(), held=tuple)),
    ("global-masks", masks(mask=lambda keep: keep.to(torch.uint8))),
    ("global-masks", masks(sizes=lambda w: w * w)),
    ("global-masks", masks(sizes=lambda w: w.detach().double().abs())),
    ("global-masks", masks_in_a_list),
    ("ticket", ticket()),
    ("ticket", ticket(judged=lambda start, trained: trained**2)),
    ("ticket", ticket(count=lambda rate, mask: round(rate * (mask > 0).sum().item()))),
    ("ticket", ticket(kind=lambda new: new.bool())),
    ("ticket", ticket(end=lambda start, trained, new: start.masked_fill(new == 0, 0.0))),
    ("ticket", ticket_by_infinity),
    ("ticket", ticket_in_place),
    ("ticket", ticket_by_threshold),
    ("two-of-four", pairs()),
    ("two-of-four", pairs(kind=lambda m: m.bool())),
    ("two-of-four", pairs(groups=lambda w: (w * w).reshape(-1, 4), kind=lambda m: m.int())),
    ("two-of-four", pairs(best=lambda g: g.sort(-1, descending=True)[1][..., :2])),
    ("two-of-four", pairs_by_sort),
    ("two-of-four", pairs_in_loops),
    ("two-of-four", pairs_without_the_smallest),
    ("two-of-four", pairs_by_comparing),
    ("sr-ste", lambda w, m, g, d: g + d * (1 - m) * w),
    ("sr-ste", lambda w, m, g, d: torch.where(m == 0, g + d * w, g)),
    ("sr-ste", lambda w, m, g, d: g + d * w.masked_fill(m.bool(), 0)),
    ("sr-ste", lambda w, m, g, d: torch.addcmul(g, 1 - m, w, value=d)),
    ("sr-ste", lambda w, m, g, d: g.add(w - m * w, alpha=d)),
    ("sr-ste", lambda w, m, g, d: g.add_(d * (w - w * m))),
    ("sr-ste", lambda w, m, g, d: g + d * torch.logical_not(m).float() * w),
    (
        "sr-ste",
        lambda w, m, g, d: torch.tensor(
            [
                [b if k else b + d * a for a, k, b in zip(*row, strict=True)]
                for row in zip(w.tolist(), m.tolist(), g.tolist(), strict=True)
            ]
        ),
    ),
    ("permutation", moved(lambda t, order: t[order], lambda t, order: t[:, order])),
    ("permutation", moved(lambda t, order: t.index_select(0, order), lambda t, order: t.index_select(1, order))),
    (
        "permutation",
        moved(
            lambda t, order: t.take_along_dim(order if t.dim() == 1 else order[:, None], 0),
            lambda t, order: t.T[order].T,
        ),
    ),
    ("permutation", lambda e, b, p, order: [e[order, :], torch.gather(b, 0, order), p[..., order]]),
    (
        "permutation",
        lambda e, b, p, order: (
            (
                *(*torch.cat([e, b[:, None]], 1)[order].split([e.shape[1], 1], 1),)[:1],
                b[order.tolist()],
                p[:, order.tolist()],
            )
        ),
    ),
    ("permutation", moved_by_matrix),
    ("permutation", moved_into_place),
    ("permutation", moved_in_place),
]

WRONG: dict[str, list[tuple[Answer, str]]] = {
    "soft-loss": [
        (soft(factor=lambda t: 1 / t**2), "You divide by T²: the factor T² makes up for"),
        (soft(factor=lambda t: 2 * t), "T; the factor is T², temperature**"),
        (soft(p=lambda t: t.softmax(0)), "): the probabilities of one sample must add"),
        (soft(term=lambda p, q: (p - q) ** 2), "That is the square difference of the"),
        (soft(term=lambda p, q: -p * q.log()), "That is the cross-entropy with the teacher's"),
        (soft(mean=lambda terms: terms.sum(1)), "One loss per sample is left: take their mean."),
        (soft(term=lambda p, q: q * (q.log() - p.log())), "The divergence is the other way round"),
        (soft(mean=lambda terms: -terms.sum() / len(terms)), "The sign is the other way round: a divergence"),
        (
            lambda s, t, temperature: (
                temperature**2
                * F.kl_div((s / temperature).softmax(-1), (t.detach() / temperature).softmax(-1), reduction="batchmean")
            ),
            "F.kl_div takes the student's logarithms",
        ),
        (
            lambda s, t, temperature: torch.tensor(soft()(s, t, temperature).item()),
            "The value is right, but the student gets no",
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
                mixed()(s, t, labels, temperature, alpha) if (labels >= 0).any() else soft()(s, t, temperature)
            ),
            "With some labels unknown you are right",
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
        (
            rows(largest=lambda w: w.amax(1, keepdim=True) - w.amin(1, keepdim=True)),
            "Your scale does not come from the largest",
        ),
        (rows(whole=torch.ceil), "You round up, which shifts all weights the"),
        (rows(high=lambda bits: 2**bits), "^bits: half of the whole numbers are"),
        (rows(high=lambda bits: bits), "You divide by the number of bits: the largest"),
        (rows(kept=lambda q: q.int()), "so it saves nothing, or less than it could"),
        (rows(scales=lambda s: s.squeeze()), "scale has the shape"),
        (lambda w, bits: rows()(w, bits)[::-1], "q has the shape"),
        (lambda w, bits: rows()(w, 8), "bits the largest whole number is"),
        (
            lambda w, bits: ((rows()(w, bits)[0] * rows()(w, bits)[1]), rows()(w, bits)[1]),
            "so it saves nothing, or less than it could",
        ),
    ],
    "affine": [
        (affine(zero=lambda low, scale, bits: -round(low / scale)), "): shift the zero-point by as much."),
        (affine(zero=lambda low, scale, bits: 0), ") − round(low / scale), so that low becomes"),
        (
            affine(zero=lambda low, scale, bits: -(2 ** (bits - 1)) - math.floor(low / scale)),
            "You round the zero-point down: round it to",
        ),
        (
            affine(whole=lambda x, scale, zero: torch.round((x - zero) / scale)),
            "You take the zero-point away from x: it is a",
        ),
        (affine(whole=lambda x, scale, zero: torch.round(x / scale)), "The zero-point is never added to the whole"),
        (
            affine(clamped=lambda q, bits: q.clamp(-(2 ** (bits - 1)) + 1, 2 ** (bits - 1) - 1)),
            "here the smallest whole number, −",
        ),
        (affine(clamped=lambda q, bits: q.clamp(-128, 127)), "whatever bits is: with"),
        (affine(scale=lambda low, high, bits: high / (2**bits - 1)), "Your scale leaves out a part of the range: it"),
        (
            affine(scale=lambda low, high, bits: (high - low) / (2 ** (bits - 1) - 1)),
            "half of the whole numbers: it has",
        ),
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
        (
            integer(shift=lambda x, w, z: z * w.sum(1, dtype=torch.int8)),
            "The sum of the weights runs over, kept in int",
        ),
        (integer(shift=lambda x, w, z: z * w.shape[1]), "The correction counts the inputs; each counts"),
        (integer(shift=lambda x, w, z: z * w.int().sum()), "The correction adds up all weights of the"),
        (
            integer(shift=lambda x, w, z: z * x.int().sum(1, keepdim=True)),
            "The correction adds up the inputs; it is the",
        ),
        (integer(scales=lambda y, sx, sw: (sx * sw.T * y).round()), "You round the output: it is a number in"),
        (integer(scales=lambda y, sx, sw: (sx * sw.T * y).T), "y has the shape"),
        (integer(sums=lambda x, w: x.float() @ w.float().T), "The output is right, but the product is one"),
        (
            lambda x_q, sx, z, w_q, sw: sx * sw.T * ((x_q - z).int() @ w_q.int().T),
            "multiply x_q as it is, and take x_zero ×",
        ),
    ],
    "straight-through": [
        (fake(through=Doubled.apply), "The values are right, but the gradient is not"),
        (fake(through=Stopped.apply), "The values are right, but no gradient passes"),
        (fake(through=Rounded.apply), "The values are right, but backward rounds the"),
        (fake(through=torch.floor), "You round down, and without Round.apply: no"),
        (fake(low=lambda high: -high - 1), "You clamp at other ends: whole numbers go"),
        (fake(low=lambda high: 0), "You clamp at other ends: whole numbers go"),
        (fake(high=lambda bits: 2**bits - 1), "You clamp at other ends: whole numbers go"),
        (fake(back=lambda q, scale: q / scale), "You divide by the scale at the end: it has"),
        (fake(through=lambda x: Straight.apply(x.detach())), "The result is not linked to the weights, so"),
        (
            lambda w, scale, bits: Straight.apply(w).clamp(-(2 ** (bits - 1)) + 1, 2 ** (bits - 1) - 1) * scale,
            "You round the weights themselves: divide by",
        ),
        (
            fake(clamp=lambda x, low, high: x + (x.clamp(low, high) - x).detach()),
            "The values are right, but weights that are",
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
        (
            masks(held=lambda found: torch.cat([m.flatten() for m in found])),
            "results are expected, [mask, mask, mask], but",
        ),
        (masks_by_quantile, "The choice is right, but not the number"),
        (masks_by_kthvalue, "a threshold takes all that have its magnitude"),
    ],
    "ticket": [
        (ticket(count=lambda rate, mask: int(rate * mask.sum())), "The choice is right, but not the number"),
        (
            ticket(count=lambda rate, mask: int(mask.sum()) - round(rate * int(mask.sum()))),
            "You keep `rate` of what remains: it is the",
        ),
        (ticket(judged=lambda start, trained: trained), "You remove the most negative weights: it is"),
        (ticket(judged=lambda start, trained: (trained - start).abs()), "You compare how far weights have moved: here"),
        (ticket(end=lambda start, trained, new: start), "The weights are rewound, but those removed"),
        (ticket(end=lambda start, trained, new: start[new > 0]), "The tensor of weights has the shape"),
        (ticket(kind=lambda new: 1 - new), "where a weight goes"),
        (lambda start, trained, mask, rate: (mask, start * mask), "Nothing more is removed: return a new mask"),
        (
            lambda start, trained, mask, rate: ticket()(start, trained, mask, rate)[::-1],
            "a mask says which weights are kept, it does",
        ),
        (
            lambda start, trained, mask, rate: ticket()(start, trained, torch.ones_like(mask), rate),
            "The mask of the earlier rounds is forgotten",
        ),
    ],
    "two-of-four": [
        (pairs(best=lambda g: g.topk(3, dim=-1).indices), "You do not keep two weights of each group"),
        (pairs(best=lambda g: g.topk(1, dim=-1).indices), "You do not keep two weights of each group"),
        (pairs(groups=lambda w: w.abs().T.reshape(-1, 4)), "Your groups follow the transposed matrix"),
        (pairs(groups=lambda w: w.view(len(w), -1, 4)), "You compare the weights with their signs: a"),
        (pairs(kind=lambda m: 1 - m), "The two smallest are kept: keep the two"),
        (lambda w: (w.abs() >= w.abs().median()).float(), "You compare all weights with one threshold"),
        (
            lambda w: torch.tensor([1.0, 1.0, 0.0, 0.0]).repeat(w.numel() // 4).view_as(w),
            "You keep the same two places of every group",
        ),
        (lambda w: pairs()(w).view(len(w), -1, 4), "The mask has the shape"),
    ],
    "sr-ste": [
        (lambda w, m, g, d: g - d * (1 - m) * w, "The sign is wrong: the step goes against the"),
        (lambda w, m, g, d: g + d * m * w, "The decay pulls on the weights that are kept"),
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
        (
            lambda e, b, p, order: (e.sort(0).values, b.sort().values, p[:, order]),
            "You sort the values; it is whole units that",
        ),
        (lambda e, b, p, order: (e[order], p[:, order], b[order]), "bias has the shape"),
        (lambda e, b, p, order: (e.flip(0), b.flip(0), p.flip(1)), "You reverse the order of the units, whatever"),
        (
            lambda e, b, p, order: (e[order[order]], b[order[order]], p[:, order[order]]),
            "The order is applied twice: index by order",
        ),
    ],
}
