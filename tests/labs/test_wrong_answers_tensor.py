"""The bank of wrong answers of lab 06, on real ranks.

The answers are written the way a student would write them, not as the faults that the judges compare with.
"""

from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional
import torch.nn.functional as F
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleOutput, RowwiseParallel

from dlojz.by_hand.tensor.axis import add_up, copy, gather_tokens, scatter_tokens, take_tokens
from dlojz.config.run_config import RunConfig
from dlojz.hardware.links import NETWORK, NVLINK
from dlojz.labs import lab06_tensor as lab
from dlojz.labs.kit.exercise import judge
from dlojz.labs.lab06_tensor.exercises_plan import compute_seconds, layer_bytes, layer_seconds
from tests.labs import student_answers_tensor as student
from tests.labs.bank import Answer, BankTests

pytestmark = pytest.mark.timeout(900)  # one of the tests makes more than a hundred groups of ranks
EXERCISES = {exercise.id: exercise for exercise in lab.EXERCISES}
differentiable: Any = torch.distributed.nn.functional
"""Collectives whose backward communicates too: where a student takes one of them for g, gradients count n times."""


def gathered(x: Any, dim: int) -> Any:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim=dim)


def column(way: str = "right") -> Answer:
    def answer(x: Any, weight: Any, bias: Any, y_gradient: Any) -> Any:
        rank, size = dist.get_rank(), dist.get_world_size()
        own, own_bias = weight.chunk(size)[rank], bias.chunk(size)[rank]
        if way == "interleaved":
            own, own_bias = weight[rank::size], bias[rank::size]
        y = x @ own.T if way == "no bias" else x @ own.T + own_bias
        if way == "rows":
            y = x.chunk(size, dim=1)[rank] @ weight.chunk(size, dim=1)[rank].T + bias
        x_gradient = y_gradient @ own
        if way == "adds outputs":
            dist.all_reduce(y)
        if way == "gathers":
            y = gathered(y, 1)
        if way == "whole work":
            return y, gathered(y_gradient, 1) @ weight
        if way == "sums twice":
            whole = torch.zeros(len(x), len(weight))
            whole[:, rank * len(own) : (rank + 1) * len(own)] = y
            dist.all_reduce(whole)
            y = whole.chunk(size, dim=1)[rank]
        if way == "gathers gradient":
            x_gradient = gathered(x_gradient, 1)
        elif way != "no backward":
            dist.all_reduce(x_gradient)
        if way == "averages":
            x_gradient /= size
        return y, x_gradient

    return answer


def row(way: str = "right") -> Answer:
    def answer(x_own: Any, weight: Any, bias: Any) -> Any:
        rank, size = dist.get_rank(), dist.get_world_size()
        y = x_own @ weight.chunk(size, dim=1)[rank].T
        if way == "bias everywhere":
            y = y + bias
        if way == "gathers":
            return gathered(y.detach(), 1) + bias.repeat(size) * 0
        if way == "differentiable":
            return differentiable.all_reduce(y) + bias
        if way == "gathers x":
            whole = gathered(x_own.detach(), 1)
            return y + (whole @ weight.T - y).detach() + bias
        if way == "one rank":
            dist.reduce(y, 0)
        elif way != "no sum":
            dist.all_reduce(y)
        if way == "mean":
            y = y / size
        return y if way in ("no bias", "bias everywhere") else y + bias

    return answer


class Entry(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Any) -> Any:
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class MeanEntry(Entry):
    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        return Entry.backward(context, gradient) / dist.get_world_size()


class EmptyEntry(Entry):
    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        return gradient


def mlp(way: str = "right") -> Answer:
    entry: Any = {"mean": MeanEntry, "empty": EmptyEntry}.get(way, Entry)

    def answer(x: Any, expand: Any, expand_bias: Any, project: Any, project_bias: Any) -> Any:
        hidden = F.gelu((x if way == "no f" else entry.apply(x)) @ expand.T + expand_bias)
        if way == "gathers between":
            size, rank = dist.get_world_size(), dist.get_rank()
            hidden = torch.cat(differentiable.all_gather(hidden), dim=1).chunk(size, dim=1)[rank]
        y = hidden @ project.T
        if way == "bias everywhere":
            y = y + project_bias
        if way == "differentiable":
            return differentiable.all_reduce(y) + project_bias
        if way != "no sum":
            dist.all_reduce(y)
        return y if way in ("bias everywhere", "no bias") else y + project_bias

    return answer


def attention(way: str = "right") -> Answer:
    def answer(x: Any, qkv: Any, project: Any, heads: int, axis: Any) -> Any:
        rank, size, width = axis.rank, axis.size, x.shape[-1]
        x = x if way == "no copy" else copy(x, axis)
        if way == "naive":
            q, k, v = (x @ qkv.chunk(size)[rank].T).chunk(3, dim=-1)
        elif way == "head by head":
            own = (x @ qkv.chunk(size)[rank].T).unflatten(-1, (-1, 3, width // heads))
            q, k, v = (one.flatten(-2) for one in own.unbind(-2))
        elif way == "interleaved":
            own = qkv.view(3, heads, -1, width)[:, rank::size].reshape(-1, width)
            q, k, v = (x @ own.T).chunk(3, dim=-1)
        else:
            own = torch.cat([part.chunk(size)[rank] for part in qkv.chunk(3)])
            q, k, v = (x @ own.T).chunk(3, dim=-1)
        q, k, v = (one.unflatten(-1, (-1, width // heads)).transpose(1, 2) for one in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v)
        y = y.reshape(*x.shape[:2], -1) if way == "unmerged" else y.transpose(1, 2).flatten(2)
        columns = project.chunk(size)[rank] if way == "project rows" else project.chunk(size, dim=1)[rank].T
        y = y @ columns
        return y if way == "no sum" else add_up(y, axis)

    return answer


def embedding(way: str = "right") -> Answer:
    def answer(tokens: Any, table: Any, axis: Any) -> Any:
        start = 0 if way == "no offset" else axis.rank * len(table)
        elsewhere = (tokens < start) | (tokens >= start + len(table))
        if way == "gathers the table":
            return torch.cat(differentiable.all_gather(table))[tokens]
        if way == "clamps":
            return add_up(table[(tokens - start).clamp(0, len(table) - 1)], axis)
        if way == "looks up all":
            return add_up(table[tokens - start], axis)
        found = table[(tokens - start).masked_fill(elsewhere, 0)]
        if way != "no mask":
            found = found * (~elsewhere).unsqueeze(-1)
        if way == "differentiable":
            return differentiable.all_reduce(found)
        return found if way == "no sum" else add_up(found, axis)

    return answer


def loss(way: str = "right") -> Answer:
    def answer(logits: Any, targets: Any, axis: Any) -> Any:
        start = 0 if way == "no offset" else axis.rank * logits.shape[-1]
        if way == "gathers":
            whole = torch.cat(differentiable.all_gather(logits), dim=-1)
            return F.cross_entropy(whole.flatten(0, 1), targets.flatten()) / axis.size
        m = logits.detach().amax(-1)
        if way != "own largest":
            m = axis.all_reduce(m, largest=True)
        elsewhere = (targets < start) | (targets >= start + logits.shape[-1])
        shifted = logits - m.unsqueeze(-1)
        target = shifted.gather(-1, (targets - start).masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1)
        if way != "no mask":
            target = torch.where(elsewhere, 0.0, target)
        total = shifted.exp().sum(-1)
        if way == "differentiable":
            return (differentiable.all_reduce(total).log() - differentiable.all_reduce(target)).mean()
        total = total if way == "sum alone" else add_up(total, axis)
        target = target if way == "target alone" else add_up(target, axis)
        losses = total.log() - target
        return losses.sum() if way == "not averaged" else losses.mean()

    return answer


def half_block(way: str = "right") -> Answer:
    def answer(x: Any, weight: Any, bias: Any, region: Any, states: Any, axis: Any) -> Any:
        stream = "split" if axis.sequence_parallel else "replicated"
        stream = way if way in ("split", "replicated") else stream
        if axis.sequence_parallel:
            if way != "norm alone":
                weight, bias = copy(weight, axis), copy(bias, axis)
            y = region(gather_tokens(F.layer_norm(x, x.shape[-1:], weight, bias), axis))
            if way == "takes":
                y = take_tokens(y, axis)
            elif way == "all-reduce":
                y = take_tokens(add_up(y, axis), axis)
            else:
                y = scatter_tokens(y, axis)
        else:
            if way == "norm always":
                weight, bias = copy(weight, axis), copy(bias, axis)
            y = F.layer_norm(x, x.shape[-1:], weight, bias)
            y = region(y if way == "no copy" else copy(y, axis))
            y = y if way == "no sum" else add_up(y, axis)
        return x + (F.dropout(y, 0.5) if way == "torch's" else states.dropout(y, 0.5, stream))

    return answer


def mbconv(way: str = "right") -> Answer:
    def answer(x: Any, own: Any, axis: Any) -> Any:
        entered = x if way == "no copy" else copy(x, axis)
        y = F.gelu(F.conv2d(entered, own.expand))
        y = F.gelu(F.conv2d(y, own.depthwise, padding=1, groups=len(own.depthwise)))
        squeezed = y.mean((2, 3)) @ own.squeeze.T
        if way == "bias everywhere":
            squeezed = squeezed + own.squeeze_bias
        if way != "gate alone":
            squeezed = add_up(squeezed, axis)
        if way != "bias everywhere":
            squeezed = squeezed + own.squeeze_bias
        squeezed = F.silu(squeezed)
        gate = torch.sigmoid(
            (squeezed if way == "gate not entered" else copy(squeezed, axis)) @ own.excite.T + own.excite_bias
        )
        y = F.conv2d(y * gate[:, :, None, None], own.project)
        if way == "differentiable":
            return x + differentiable.all_reduce(y)
        y = y if way == "no sum" else add_up(y, axis)
        return (entered if way == "shortcut entered" else x) + y

    return answer


COLUMNS, ROWS = ("query", "key", "value", "mlp_gate", "mlp_expand"), ("attention_project", "mlp_project")


def plan(**changes: Any) -> Answer:
    def answer() -> Any:
        found: dict[str, Any] = {name: ColwiseParallel() for name in COLUMNS}
        found |= {name: RowwiseParallel() for name in ROWS} | changes
        return {name: style for name, style in found.items() if style is not None}

    return answer


def entered(*norms: str, local: bool = False, **changes: Any) -> Answer:
    """The plan of a block whose norms hand on one DTensor."""
    once = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Replicate(), use_local_output=local)
    return plan(**dict.fromkeys(norms or ("norm1", "norm2"), once), **changes)


REFERENCES: dict[str, Answer] = {
    "column-linear": column(),
    "row-linear": row(),
    "one-all-reduce": mlp(),
    "attention-heads": attention(),
    "vocabulary-embedding": embedding(),
    "vocabulary-loss": loss(),
    "sequence-parallel": half_block(),
    "mbconv-channels": mbconv(),
    "parallelize-plan": plan(),
    "layer-bytes": layer_bytes,
    "fewest-bytes": entered(),
}

BANK: dict[str, list[tuple[Answer, str]]] = {
    "column-linear": [
        (column("rows"), "The wrong dimension is split"),
        (column("adds outputs"), "which stand side by side"),
        (column("gathers"), "Every rank holds the whole output"),
        (column("interleaved"), "every N-th feature"),
        (column("no bias"), "The bias is never added"),
        (column("no backward"), "their weights drift apart"),
        (column("gathers gradient"), "add them up (all-reduce, not all-gather)"),
        (column("averages"), "2 times too small"),
        (column("whole work"), "bring tensors together side by side"),
        (column("sums twice"), "180 numbers go through all-reduce, and the gradient of x has 60"),
        (lambda x, weight, bias, gradient: None, "Your function returns nothing: end it with return"),
    ],
    "row-linear": [
        (row("no sum"), "the all-reduce of the forward pass is missing"),
        (row("bias everywhere"), "counts as many times as there are ranks"),
        (row("no bias"), "The bias is never added"),
        (row("gathers"), "side by side"),
        (row("mean"), "You average the partial products"),
        (row("one rank"), "rank 0"),
        (row("differentiable"), "whole on each of them already"),
        (row("gathers x"), "the ranks bring tensors together side by side"),
    ],
    "one-all-reduce": [
        (mlp("no f"), "so is the loss of the first step"),
        (mlp("empty"), "the all-reduce of the backward pass is missing"),
        (mlp("no sum"), "the all-reduce of the forward pass is missing"),
        (mlp("bias everywhere"), "counts as many times as there are ranks"),
        (mlp("no bias"), "The bias is never added"),
        (mlp("differentiable"), "whole on each of them already"),
        (mlp("mean"), "That mean belongs to data parallelism"),
        (mlp("gathers between"), "brought together between the two layers"),
    ],
    "attention-heads": [
        (attention("naive"), "a plain slice of them gives some ranks queries only"),
        (attention("head by head"), "its rows are laid out (3, heads, H)"),
        (attention("interleaved"), "The order of the heads is another one"),
        (attention("unmerged"), "side by side in the wrong order"),
        (attention("project rows"), "The wrong dimension of project"),
        (attention("no sum"), "the all-reduce of the forward pass is missing"),
        (attention("no copy"), "the all-reduce of the backward pass is missing"),
    ],
    "vocabulary-embedding": [
        (embedding("no offset"), "The offset of the vocabulary is missing"),
        (embedding("no mask"), "must be 0"),
        (embedding("clamps"), "must be 0"),
        (embedding("no sum"), "zeros for the words of the others"),
        (embedding("looks up all"), "IndexError"),
        (embedding("differentiable"), "the gradient of the table is as many times too large"),
    ],
    "vocabulary-loss": [
        (loss("own largest"), "in different units"),
        (loss("no offset"), "The offset of the vocabulary is missing"),
        (loss("no mask"), "must be 0"),
        (loss("sum alone"), "The denominator holds this rank's words only"),
        (loss("target alone"), "known to one rank only"),
        (loss("not averaged"), "return their mean"),
        (loss("differentiable"), "2 times too large"),
    ],
    "sequence-parallel": [
        (half_block("replicated"), "all ranks draw the same dropout mask"),
        (half_block("torch's"), "all ranks draw the same dropout mask"),
        (half_block("split"), "each draws its own dropout mask"),
        (half_block("takes"), "a part is taken where a sum is due"),
        (half_block("no sum"), "the all-reduce of the forward pass is missing"),
        (half_block("norm alone"), "this rank's tokens only"),
        (half_block("norm always"), "copy adds it up over the ranks, but each of them sees all tokens"),
        (half_block("no copy"), "the all-reduce of the backward pass is missing"),
        (half_block("all-reduce"), "a reduce-scatter sends half as much"),
    ],
    "mbconv-channels": [
        (mbconv("gate alone"), "sees this rank's channels only"),
        (mbconv("bias everywhere"), "The bias of squeeze"),
        (mbconv("no sum"), "the all-reduce of the forward pass is missing"),
        (mbconv("gate not entered"), "comes from this rank's gates only"),
        (mbconv("no copy"), "the all-reduce of the backward pass is missing"),
        (mbconv("differentiable"), "whole on each of them already"),
        (mbconv("shortcut entered"), "The residual connection goes through the region's entry"),
    ],
    "parallelize-plan": [
        (plan(query=RowwiseParallel()), "query is row-parallel"),
        (plan(mlp_project=ColwiseParallel()), "mlp_project is column-parallel"),
        (plan(key=None), "key: not in the plan"),
        (plan(mlp_gate=None, mlp_expand=None, mlp_project=None), "mlp_gate, mlp_expand, mlp_project: not in the plan"),
        (plan(up=ColwiseParallel()), "has no layer 'up'"),
        (plan(query=ColwiseParallel), "needs an instance"),
        (
            plan(
                mlp_gate=ColwiseParallel(output_layouts=Replicate()),
                mlp_expand=ColwiseParallel(output_layouts=Replicate()),
                mlp_project=RowwiseParallel(input_layouts=Replicate()),
            ),
            "forward communicates 4 times",
        ),
        (lambda: None, "A dictionary is expected"),
    ],
    "layer-bytes": [
        (lambda b, t, d, n, size: 2 * b * t * d * size * 2 * (n - 1) / n, "Half is missing"),
        (lambda b, t, d, n, size: 4 * b * t * d * size, "the size of the messages"),
        (lambda b, t, d, n, size: 8 * b * t * d * size, "You count each message twice"),
        (lambda b, t, d, n, size: 8 * b * t * d * size * (n - 1) / n**2, "once more"),
        (lambda b, t, d, n, size: 8 * b * t * d * (n - 1) / n, "a number of elements"),
        (lambda b, t, d, n, size: 8 * b * d * d * size * (n - 1) / n, "You send the weights"),
        (lambda b, t, d, n, size: None, "returns nothing"),
    ],
    "fewest-bytes": [
        (
            entered(mlp_gate=None, mlp_expand=None, mlp_project=None),
            "mlp_gate, mlp_expand, mlp_project: not in the plan",
        ),
        (entered(value=None), "value: not in the plan"),
        (entered(attention_project=ColwiseParallel()), "attention_project is column-parallel"),
        (entered(mlp_gate=RowwiseParallel()), "mlp_gate is row-parallel"),
        (entered("norm3"), "has no layer 'norm3'"),
        (plan(norm1=PrepareModuleOutput), "needs an instance"),
        (lambda: list(entered()().items()), "A dictionary is expected"),
    ],
}


WRONG = {name: [*answers, *student.WRONG.get(name, ())] for name, answers in BANK.items()}
RIGHT = [
    *student.RIGHT,
    ("fewest-bytes", lambda: dict(reversed(entered()().items()))),
    ("fewest-bytes", lambda: OrderedDict(entered()())),
    ("fewest-bytes", entered("norm*")),
    ("fewest-bytes", entered("norm?")),
]


class TestBank(BankTests):
    exercises, predictions = EXERCISES, lab.PREDICTIONS
    wrong, right, others = WRONG, REFERENCES, RIGHT


@pytest.mark.parametrize(
    ("answer", "score"), [(plan(), 7), (entered("norm1"), 5), (entered("norm2"), 6), (entered(local=True), 7)]
)
def test_judge_finds_a_plan_that_enters_a_region_often_valid_and_short(answer: Answer, score: float) -> None:
    verdict = judge(EXERCISES["fewest-bytes"], answer)
    assert (verdict.state, verdict.score) == ("note", score)


def test_the_bytes_of_a_layer_are_those_predicted_for_a_model() -> None:
    from dlojz.prediction.communication import block_messages

    config = RunConfig.of(model="gpt_tiny", engine="by_hand", tp=2, micro_batch=4)
    layer = [one.message_bytes for one in block_messages(config)[1]]
    assert len(layer) == 4
    assert sum(layer) == layer_bytes(4, 128, 128, 2, 4)  # with 2 ranks each sends half of a message twice


def test_a_layer_is_faster_inside_the_node() -> None:
    gpt3 = (1, 2048, 12288, 8, 2)
    assert layer_bytes(*gpt3) / NVLINK.bytes_per_s < layer_seconds(*gpt3, NVLINK) < layer_seconds(*gpt3, NETWORK)
    # Narayanan et al. 2021, eq. 3: 96·B·T·l·h²(1 + T/(6h)) with recomputation, one forward more than here.
    assert compute_seconds(1, 2048, 12288, 1, 1.0) == pytest.approx(72 * 2048 * 12288**2 * (1 + 2048 / 73728))
