"""Answers of lab 06 as students write them, from its text alone: right ones, and wrong ones with their words."""

import math
from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
import torch.nn.functional as F
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from dlojz.by_hand.tensor.axis import TensorAxis, add_up, copy, gather_tokens, scatter_tokens
from tests.labs.bank import Answer


def own(whole: Any, dim: int = 0, rank: int | None = None) -> Any:
    return whole.chunk(dist.get_world_size(), dim)[dist.get_rank() if rank is None else rank]


def summed(x: Any, **how: Any) -> Any:
    dist.all_reduce(x, **how)
    return x


def waited(x: Any) -> Any:
    work: Any = dist.all_reduce(x, async_op=True)
    work.wait()
    return x


def last() -> int:
    return dist.get_world_size() - 1 - dist.get_rank()


# By columns.


def column_of_autograd(x: Any, weight: Any, bias: Any, y_gradient: Any) -> Any:
    x = x.detach().clone().requires_grad_()
    y = F.linear(x, own(weight), own(bias))
    y.backward(y_gradient)
    return y.detach(), summed(x.grad)


def column_by_arithmetic(x: Any, weight: Any, bias: Any, y_gradient: Any) -> Any:
    rows = len(weight) // dist.get_world_size()
    start = dist.get_rank() * rows
    y = torch.empty(len(x), rows)
    for sample in range(len(x)):
        for row in range(rows):
            y[sample, row] = weight[start + row] @ x[sample] + bias[start + row]
    gradient = torch.zeros_like(x)
    for row in range(rows):
        gradient += torch.outer(y_gradient[:, row], weight[start + row])
    return y, summed(gradient)


def column_by_numpy(x: Any, weight: Any, bias: Any, y_gradient: Any) -> Any:
    w = own(weight).numpy()
    return [torch.from_numpy(x.numpy() @ w.T + own(bias).numpy()), summed(torch.from_numpy(y_gradient.numpy() @ w))]


def column_forgets_the_sum(x: Any, weight: Any, bias: Any, y_gradient: Any) -> Any:
    dist.all_reduce(y_gradient @ own(weight))
    return x @ own(weight).T + own(bias), y_gradient @ own(weight)


# By rows.


def row_in_a_loop(x_own: Any, weight: Any, bias: Any) -> Any:
    inputs, start = x_own.shape[1], dist.get_rank() * x_own.shape[1]
    y = sum(torch.outer(x_own[:, i], weight[:, start + i]) for i in range(inputs))
    return summed(y) + bias


def row_through_data(x_own: Any, weight: Any, bias: Any) -> Any:
    y = F.linear(x_own, own(weight, 1))
    dist.all_reduce(y.data)
    return y.add(bias)


# The MLP.


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Any) -> Any:
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        return summed(gradient.clone())


class EnterAndSum(Enter):
    @staticmethod
    def forward(context: Any, x: Any) -> Any:
        return summed(x.clone())


def mlp(
    enter: Any = Enter.apply,
    gelu: Any = F.gelu,
    leave: Any = summed,
    first: Any = lambda x, w, b: x @ w.T + b,
    second: Any = lambda h, w: h @ w.T,
    end: Any = lambda y, b: y + b,
) -> Answer:
    return lambda x, w1, b1, w2, b2: end(leave(second(gelu(first(enter(x), w1, b1)), w2)), b2)


def mlp_with_a_hook(x: Any, expand: Any, expand_bias: Any, project: Any, project_bias: Any) -> Any:
    entered = x.view_as(x)
    if entered.requires_grad:
        entered.register_hook(lambda gradient: summed(gradient.clone()))
    return mlp(enter=lambda _: entered)(x, expand, expand_bias, project, project_bias)


def mlp_of_the_package(x: Any, expand: Any, expand_bias: Any, project: Any, project_bias: Any) -> Any:
    axis = TensorAxis(dist.group.WORLD)
    h = F.gelu(torch.addmm(expand_bias, copy(x, axis), expand.T))
    return add_up(torch.einsum("bh,oh->bo", h, project), axis) + project_bias


# Attention.


def heads_one_by_one(scale: float | None = None, causal: bool = False, keep: Any = None) -> Answer:
    def answer(x: Any, qkv: Any, project: Any, heads: int, axis: Any) -> Any:
        size = x.shape[-1] // heads
        each = heads // axis.size
        x, y = copy(x, axis), 0
        for head in keep(axis, heads) if keep else range(axis.rank * each, (axis.rank + 1) * each):
            rows = slice(head * size, (head + 1) * size)
            q, k, v = (x @ part[rows].T for part in qkv.chunk(3))
            scores = q @ k.transpose(1, 2) / (math.sqrt(size) if scale is None else scale or math.sqrt(x.shape[-1]))
            if causal:
                scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -torch.inf)
            y = y + scores.softmax(-1) @ v @ project[:, rows].T
        return add_up(y, axis)

    return answer


def attention(
    take: Any = lambda t, axis: t.chunk(axis.size)[axis.rank],
    enter: Any = copy,
    leave: Any = add_up,
    order: tuple[int, int, int] = (0, 1, 2),
    merge: Any = lambda y: y.transpose(1, 2).reshape(y.shape[0], y.shape[2], -1),
    columns: Any = lambda w, axis: w.chunk(axis.size, 1)[axis.rank],
) -> Answer:
    def answer(x: Any, qkv: Any, project: Any, heads: int, axis: Any) -> Any:
        b, t, width = x.shape
        x = enter(x, axis)
        parts = qkv.split(width)
        own = [F.linear(x, take(parts[i], axis)).reshape(b, t, -1, width // heads).permute(0, 2, 1, 3) for i in order]
        return leave(F.linear(merge(F.scaled_dot_product_attention(*own)), columns(project, axis)), axis)

    return answer


def attention_by_index(x: Any, qkv: Any, project: Any, heads: int, axis: Any) -> Any:
    width, share = x.shape[-1], x.shape[-1] // axis.size
    mine = torch.arange(axis.rank * share, (axis.rank + 1) * share)
    q, k, v = (copy(x, axis) @ qkv[mine + part * width].T for part in range(3))
    q, k, v = (torch.stack(one.split(width // heads, -1), 1) for one in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v)
    return add_up(torch.cat(y.unbind(1), -1) @ project.index_select(1, mine).T, axis)


# The vocabulary.


def embedding(
    inside: Any = lambda t, start, n: (t >= start) & (t < start + n),
    leave: Any = add_up,
    place: Any = lambda t, n: t % n,
    rank: Any = lambda axis: axis.rank,
) -> Answer:
    def answer(tokens: Any, table: Any, axis: Any) -> Any:
        n = len(table)
        kept = inside(tokens, rank(axis) * n, n)
        return leave(table[place(tokens, n)] * kept[..., None], axis)

    return answer


def loss(
    m: Any = lambda logits, axis: axis.all_reduce(logits.detach().max(-1).values, largest=True),
    leave: Any = add_up,
    last: Any = lambda total, target: (total.log() - target).mean(),
    to_target: Any = lambda logits, m: logits - m[..., None],
    inside: Any = lambda t, start, n: (t >= start) & (t < start + n),
) -> Answer:
    def answer(logits: Any, targets: Any, axis: Any) -> Any:
        n = logits.shape[-1]
        largest = m(logits, axis)
        total = leave(torch.exp(logits - largest[..., None]).sum(dim=-1), axis)
        mine = inside(targets, axis.rank * n, n)
        there = (targets % n)[..., None]
        target = leave(torch.take_along_dim(to_target(logits, largest), there, -1)[..., 0] * mine, axis)
        return last(total, target)

    return answer


def loss_by_logsumexp(logits: Any, targets: Any, axis: Any) -> Any:
    local = torch.logsumexp(logits, -1)
    m = axis.all_reduce(local.detach().clone(), largest=True)
    n = logits.shape[-1]
    one_hot = F.one_hot(targets.clamp(0, None), n * axis.size)[..., axis.rank * n : (axis.rank + 1) * n]
    both = torch.stack([torch.exp(local - m), (logits * one_hot).sum(-1)])
    total, target = add_up(both, axis)
    return (m + total.log() - target).sum() / targets.numel()


def loss_token_by_token(logits: Any, targets: Any, axis: Any) -> Any:
    n, found = logits.shape[-1], []
    for row, target in zip(logits.flatten(0, 1), targets.flatten().tolist(), strict=True):
        m = axis.all_reduce(row.detach().max(), largest=True)
        mine = row[target - axis.rank * n] - m if target // n == axis.rank else 0 * row[0]
        found.append(torch.log(add_up((row - m).exp().sum(), axis)) - add_up(mine, axis))
    return torch.stack(found).mean()


# Half a block.


def layer_norm(x: Any, weight: Any, bias: Any, eps: float = 1e-5, unbiased: bool = False) -> Any:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(x.var(-1, keepdim=True, unbiased=unbiased) + eps) * weight + bias


def torch_norm(x: Any, weight: Any, bias: Any) -> Any:
    return F.layer_norm(x, [x.size(-1)], weight=weight, bias=bias, eps=1e-5)


def half_block(
    norm: Any = torch_norm,
    enter: Any = lambda h, axis: gather_tokens(h, axis) if axis.sequence_parallel else copy(h, axis),
    leave: Any = lambda h, axis: scatter_tokens(h, axis) if axis.sequence_parallel else add_up(h, axis),
    parameters: Any = lambda p, axis: copy(p, axis) if axis.sequence_parallel else p,
    stream: Any = lambda axis: "split" if axis.sequence_parallel else "replicated",
    p: float = 0.5,
    end: Any = lambda x, y: x + y,
) -> Answer:
    def answer(x: Any, weight: Any, bias: Any, region: Any, states: Any, axis: Any) -> Any:
        h = norm(x, parameters(weight, axis), parameters(bias, axis))
        return end(x, states.dropout(leave(region(enter(h, axis)), axis), p, stream(axis)))

    return answer


def half_block_in_branches(x: Any, weight: Any, bias: Any, region: Any, states: Any, axis: Any) -> Any:
    if not axis.sequence_parallel:
        y = add_up(region(copy(torch.layer_norm(x, x.shape[-1:], weight, bias), axis)), axis)
        return states.dropout(y, 0.5, "replicated") + x
    both = copy(torch.stack([weight, bias]), axis)
    y = region(gather_tokens(torch.layer_norm(x, x.shape[-1:], both[0], both[1]), axis))
    return states.dropout(scatter_tokens(y, axis), 0.5, "split") + x


def half_block_post_norm(x: Any, weight: Any, bias: Any, region: Any, states: Any, axis: Any) -> Any:
    y = half_block(norm=lambda x, w, b: x)(x, weight, bias, region, states, axis)
    parts = (copy(weight, axis), copy(bias, axis)) if axis.sequence_parallel else (weight, bias)
    return torch_norm(y, *parts)


# Convolutions.


def mbconv(  # noqa: PLR0917 - each is one way to write it
    act: Any = F.gelu,
    point: Any = F.conv2d,
    pool: Any = lambda h: h.mean((2, 3)),
    gate: Any = torch.sigmoid,
    inner: Any = F.silu,
    enter: Any = copy,
    leave: Any = add_up,
    small: Any = add_up,
    end: Any = lambda x, y: x + y,
    squeezes: Any = lambda s, own, small, inner, axis: inner(small(s @ own.squeeze.T, axis) + own.squeeze_bias),
    gated: Any = lambda h, g: h * g[:, :, None, None],
    enter_gate: Any = copy,
) -> Answer:
    def answer(x: Any, own: Any, axis: Any) -> Any:
        h = act(point(enter(x, axis), own.expand))
        h = act(F.conv2d(h, own.depthwise, None, stride=1, padding="same", groups=h.shape[1]))
        s = squeezes(pool(h), own, small, inner, axis)
        g = gate(F.linear(enter_gate(s, axis), own.excite, own.excite_bias))
        return end(x, leave(point(gated(h, g), own.project), axis))

    return answer


def mbconv_sums_all(x: Any, own: Any, axis: Any) -> Any:
    return add_up(mbconv(leave=lambda y, axis: y)(x, own, axis), axis)


COLUMNS = ("query", "key", "value", "mlp_gate", "mlp_expand")
ROWS = ("attention_project", "mlp_project")


def plan(column: Any = ColwiseParallel, row: Any = RowwiseParallel, **changes: Any) -> Answer:
    return lambda: {**{n: column() for n in COLUMNS}, **{n: row() for n in ROWS}, **changes}


def plan_by_name() -> Any:
    found = {}
    for name in ("mlp_project", "mlp_expand", "mlp_gate", "attention_project", "value", "key", "query"):
        found[name] = RowwiseParallel() if name.endswith("project") else ColwiseParallel()
    return found


def left_out(*names: str) -> Answer:
    return lambda: {name: style for name, style in plan()().items() if name not in names}


def messages(
    per_layer: float = 4, ring: Any = lambda n: 2 * (n - 1) / n, size: Any = lambda b, t, d, z: b * t * d * z
) -> Answer:
    return lambda b, t, d, n, z: per_layer * ring(n) * size(b, t, d, z)


RIGHT: list[tuple[str, Answer]] = [
    (
        "column-linear",
        lambda x, w, b, g: [torch.addmm(own(b), x, own(w).T), waited(torch.einsum("bo,oi->bi", g, own(w)))],
    ),
    ("column-linear", column_of_autograd),
    ("column-linear", column_by_arithmetic),
    ("column-linear", column_by_numpy),
    ("column-linear", lambda x, w, b, g: ((own(w) @ x.T).T.add_(own(b)), summed((own(w).T @ g.T).T.contiguous()))),
    ("row-linear", row_in_a_loop),
    ("row-linear", row_through_data),
    ("one-all-reduce", mlp_with_a_hook),
    ("one-all-reduce", mlp_of_the_package),
    ("attention-heads", heads_one_by_one()),
    (
        "vocabulary-loss",
        loss(m=lambda logits, axis: axis.all_reduce(logits.detach().max(), largest=True).expand(logits.shape[:-1])),
    ),
    ("vocabulary-embedding", embedding()),
    ("vocabulary-loss", loss_by_logsumexp),
    ("vocabulary-loss", loss_token_by_token),
    ("sequence-parallel", half_block(norm=lambda x, w, b: F.layer_norm(x, x.shape[-1:]) * w + b)),
    ("sequence-parallel", half_block_in_branches),
    ("mbconv-channels", mbconv(gate=lambda z: 1 / (1 + torch.exp(-z)), inner=lambda s: s * s.sigmoid())),
    ("parallelize-plan", plan_by_name),
    ("parallelize-plan", lambda: OrderedDict(plan()())),
    ("layer-bytes", lambda b, t, d, n, z: 8 * (n - 1) * b * t * d * z // n),
]

WRONG: dict[str, list[tuple[Answer, str]]] = {
    "column-linear": [
        (
            lambda x, w, b, g: (x @ own(w).T + own(b, rank=0), summed(g @ own(w))),
            "'s part of the bias: cut it as the weight",
        ),
        (
            lambda x, w, b, g: (x @ own(w, rank=0).T + own(b, rank=0), summed(g @ own(w, rank=0))),
            "'s outputs: take this rank's rows",
        ),
        (
            lambda x, w, b, g: (x @ own(w).T + own(b), summed(g @ own(w), op=dist.ReduceOp.MAX)),
            "You take the largest contribution to the",
        ),
        (lambda x, w, b, g: (summed(g @ own(w)), x @ own(w).T + own(b)), "The two results are swapped: first the"),
        (lambda x, w, b, g: (x @ own(w).T + own(b), summed(g) @ own(w)), "You add up y_gradient over the ranks, but"),
        (
            lambda x, w, b, g: (F.linear(x, w, b).chunk(dist.get_world_size(), 1)[dist.get_rank()], summed(g @ own(w))),
            "The values are right, but every rank computes",
        ),
        (column_forgets_the_sum, "The forward pass is right, and so is the loss"),
    ],
    "row-linear": [
        (
            lambda x, w, b: summed(F.linear(x, own(w, 1), b if dist.get_rank() == 0 else None)),
            "The output is right, but not the gradient of",
        ),
        (
            lambda x, w, b: summed(F.linear(x, own(w, 1), b / dist.get_world_size())),
            "The output is right, but not the gradient of",
        ),
        (lambda x, w, b: summed((x @ own(w, 1).T).detach()) + b, "There is no gradient of x: nothing links the"),
        (
            lambda x, w, b: summed(x @ w[:, dist.get_rank() :: dist.get_world_size()].T) + b,
            "You take every N-th input of the weight: this",
        ),
        (lambda x, w, b: summed(x @ own(w, 1, 0).T) + b, "'s inputs: take this rank's"),
        (
            lambda x, w, b: summed(x @ own(w, 1).T, op=dist.ReduceOp.MAX) + b,
            "You take the largest partial product (MAX)",
        ),
    ],
    "one-all-reduce": [
        (mlp(gelu=F.relu), "The activation is another one: F.gelu, in its"),
        (mlp(gelu=lambda h: F.gelu(summed(h))), "You add the hidden features up over the"),
        (mlp(first=lambda x, w, b: x @ w.T), "expand_bias is left out of the first layer."),
        (mlp(enter=EnterAndSum.apply), "Your f adds x up in forward: x is whole on"),
        (mlp(leave=lambda y: summed(y.detach())), "There is no gradient of expand: nothing links"),
        (mlp(leave=lambda y: summed(summed(y))), "The partial products are added up twice: one"),
    ],
    "attention-heads": [
        (attention_by_index, "all-reduces are made, and two are enough"),
        (heads_one_by_one(scale=1.0), "The scores are not divided by √H, H being the"),
        (heads_one_by_one(causal=True), "Your attention is causal: here each token"),
        (heads_one_by_one(keep=lambda axis, heads: range(heads // axis.size)), "take this rank's, chunk(axis.size"),
        (attention(order=(1, 0, 2)), "Queries, keys and values are exchanged: the"),
        (attention(columns=lambda w, axis: w.chunk(axis.size, 1)[0]), "Heads and columns of project do not go"),
        (
            attention(take=lambda w, axis: w.chunk(axis.size)[axis.size - 1 - axis.rank]),
            "Heads and columns of project do not go",
        ),
    ],
    "vocabulary-embedding": [
        (
            embedding(inside=lambda t, start, n: (t >= start) & (t <= start + n)),
            "Off by one: this rank's words go from start",
        ),
        (
            embedding(inside=lambda t, start, n: (t > start) & (t < start + n)),
            "Off by one: this rank's words go from start",
        ),
        (embedding(inside=lambda t, start, n: t >= start), "Words that come after this rank's are looked"),
        (embedding(leave=lambda y, axis: add_up(y.detach(), axis)), "There is no gradient of the table: nothing"),
        (embedding(rank=lambda axis: axis.size - 1 - axis.rank), "The order of the ranks is reversed: rank"),
        (
            embedding(leave=lambda y, axis: axis.all_reduce(y.detach().clone(), largest=True)),
            "You take the largest over the ranks: against",
        ),
    ],
    "vocabulary-loss": [
        (
            loss(m=lambda logits, axis: torch.zeros(logits.shape[:-1]) + 60),
            "look for the exponential of a large number",
        ),
        (
            loss(m=lambda logits, axis: axis.all_reduce(logits.detach().max(-1).values)),
            "look for the exponential of a large number, a logarithm of 0",
        ),
        (loss(to_target=lambda logits, m: logits), "m is taken away from the logits under the"),
        (loss(last=lambda total, target: (target - total.log()).mean()), "The sign is the other way round: log Σ exp"),
        (loss(last=lambda total, target: total.log() - target), "One loss per token is left: return their mean."),
        (loss(inside=lambda t, start, n: (t > start) & (t < start + n)), "Off by one: this rank's words go from start"),
        (
            loss(last=lambda total, target: (total.log() - target).sum(1).mean()),
            "You add the tokens of a sample up, then take",
        ),
        (
            lambda logits, targets, axis: F.cross_entropy(logits.flatten(0, 1), targets.flatten() % logits.shape[-1]),
            "Each rank takes the cross-entropy of its words alone",
        ),
    ],
    "sequence-parallel": [
        (half_block(end=lambda x, y: y), "The residual connection is missing: x + …"),
        (half_block(p=0.1), "The dropout has another probability: it is"),
        (
            half_block(norm=lambda x, w, b: layer_norm(x, w, b, unbiased=True)),
            "layer_norm divides by D (unbiased=False).",
        ),
        (half_block(norm=lambda x, w, b: F.layer_norm(x, x.shape[-1:])), "The norm's weight and bias are left out"),
        (half_block(end=lambda x, y: x.detach() + y), "The output is right, but no gradient takes"),
        (half_block_post_norm, "The norm comes at the end: here it comes"),
    ],
    "mbconv-channels": [
        (mbconv(act=F.relu), "The activation of the convolutions is another"),
        (mbconv(inner=lambda s: s), "The activation of squeeze is missing: F.silu."),
        (mbconv(pool=lambda h: h.sum((2, 3))), "You add the pixels up: squeeze takes the mean"),
        (mbconv(end=lambda x, y: y), "The residual connection is missing: x + …"),
        (mbconv(gated=lambda h, g: h), "The gate is not used: multiply the channels"),
        (
            mbconv(
                squeezes=lambda s, own, small, inner, axis: small(inner(s @ own.squeeze.T + own.squeeze_bias), axis)
            ),
            "The sum over the ranks comes at the wrong",
        ),
        (mbconv_sums_all, "x is added on every rank before the sum, so"),
    ],
    "parallelize-plan": [
        (lambda: dict.fromkeys((*COLUMNS, *ROWS), ColwiseParallel()), "attention_project is column-parallel, but"),
        (lambda: dict.fromkeys((*COLUMNS, *ROWS), RowwiseParallel()), "query is row-parallel, but what it reads, x"),
        (
            lambda: dict.fromkeys(COLUMNS, RowwiseParallel()) | dict.fromkeys(ROWS, ColwiseParallel()),
            "query is row-parallel, but what it reads, x",
        ),
        (
            lambda: dict.fromkeys(COLUMNS, "colwise") | dict.fromkeys(ROWS, "rowwise"),
            "'query' needs an instance of a style, such as",
        ),
        (lambda: list(plan()().items()), "A dictionary is expected, name of a layer to"),
        (left_out("attention_project", "mlp_project"), "attention_project, mlp_project: not in the"),
        (left_out("mlp_gate"), "mlp_gate: not in the plan, hence whole on"),
        (plan(mlp_gate=RowwiseParallel()), "mlp_gate is row-parallel, but what it reads"),
        (lambda: plan, "A dictionary is expected, name of a layer to"),
    ],
    "layer-bytes": [
        (messages(1), "You count a quarter: the layer makes four"),
        (messages(3), "You count three all-reduces: two regions, two"),
        (messages(ring=lambda n: 2 * (n - 1)), "You multiply by n: in a ring each of the"),
        (messages(ring=lambda n: 2 / n), "You count one chunk in each direction of the"),
        (messages(size=lambda b, t, d, z: b * t * z), "The width is left out: a token's activation"),
        (messages(size=lambda b, t, d, z: t * d * z), "The samples are left out: the message holds"),
        (messages(size=lambda b, t, d, z: 8 * b * t * d * z), "That is in bits: number_bytes is in bytes"),
    ],
}
