"""Exercises of lab 06 beyond one layer: MBConv by channels, torch's `parallelize_module`, the bytes that a layer sends.

MBConv is held to the output and gradients of one process. A plan is applied on two ranks and its results are compared;
where they are wrong, the plan says which layer is the cause, and names that torch would pass over are refused.

Shape suffixes: B batch, C channels, c hidden channels of one rank, H and W of the feature map.
"""

import logging
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dlojz.by_hand.collectives.cost import cost_s
from dlojz.hardware.links import Link
from dlojz.labs.kit.exercise import Mistake, Wrong, kind_of
from dlojz.labs.kit.exercise_texts import Texts, edited_when_called
from dlojz.labs.kit.judges import Judge
from dlojz.labs.kit.rank_judges import (
    COUNTED_AGAIN,
    NO_BACKWARD_SUM,
    NO_FORWARD_SUM,
    OF_X,
    OUTPUT,
    TENSOR_CASES,
    Values,
    added,
    gradient,
    normals,
    only,
    refuse_gathers,
    times_ranks,
)
from dlojz.models.sizes import LlamaSize
from dlojz.processes.forks import RankAnswer

TEXTS = Texts(__file__)

CONVOLUTION_BATCH, CHANNELS, HIDDEN, SQUEEZED, SIDE = 2, 4, 12, 3, 5
NAMES = ("expand", "depthwise", "squeeze", "squeeze_bias", "excite", "excite_bias", "project")
_CUT: dict[str, int | None] = {
    "expand": 0, "depthwise": 0, "squeeze": 1, "squeeze_bias": None, "excite": 0, "excite_bias": 0, "project": 1,
}  # fmt: skip
"""The dimension along which each weight is sharded; None: whole on every rank."""
_JUDGED = ("depthwise", "squeeze", "squeeze_bias", "project")
_NAMES = (OUTPUT, OF_X, *(f"gradient of {name}" for name in _JUDGED))


def _inputs(seed: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """x, the coefficients of the loss, the whole weights."""
    image = (CONVOLUTION_BATCH, CHANNELS, SIDE, SIDE)
    shapes = ((HIDDEN, CHANNELS, 1, 1), (HIDDEN, 1, 3, 3), (SQUEEZED, HIDDEN), (SQUEEZED,), (HIDDEN, SQUEEZED),
              (HIDDEN,), (CHANNELS, HIDDEN, 1, 1))  # fmt: skip
    x, coefficients, *weights = normals(seed, image, image, *shapes)
    return x, coefficients, dict(zip(NAMES, weights, strict=True))


def _own(rank: int, size: int, seed: int) -> SimpleNamespace:
    weights = _inputs(seed)[2]
    parts = {name: weights[name] if dim is None else weights[name].chunk(size, dim)[rank] for name, dim in _CUT.items()}
    return SimpleNamespace(**{name: part.clone().requires_grad_() for name, part in parts.items()})  # fmt: skip


def _gradients(shard: SimpleNamespace) -> dict[str, Any]:
    return {f"gradient of {name}": getattr(shard, name).grad for name in _JUDGED}


def _convolution_trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> dict[str, Any]:
    from dlojz.by_hand.tensor.axis import TensorAxis

    x, coefficients, _ = _inputs(seed)
    x.requires_grad_()
    shard = _own(rank, size, seed)
    y = answer(x, shard, TensorAxis(dist.group.WORLD))
    if y is not None and y.shape == x.shape and y.requires_grad:
        (y * coefficients).sum().backward()
    return {OUTPUT: y, OF_X: x.grad, **_gradients(shard)}


def _only(parts: list[Tensor], rank: int) -> Tensor:
    """The sum of all ranks' parts, through which the gradient reaches this rank's part only."""
    return added(part if peer == rank else part.detach() for peer, part in enumerate(parts))


def _shares(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    """What each rank holds, its contribution to the gradient of x by itself."""
    x, coefficients, _ = _inputs(seed)
    ranks, shards = range(size), [_own(peer, size, seed) for peer in range(size)]
    xs = [x.clone().requires_grad_() for _ in ranks]
    hidden = []
    for x_BCHW, shard in zip(xs, shards, strict=True):
        expanded = F.gelu(F.conv2d(x_BCHW, shard.expand))
        hidden.append(F.gelu(F.conv2d(expanded, shard.depthwise, padding=1, groups=len(shard.depthwise))))
    # Means over the pixels, (B, HIDDEN / N) @ (HIDDEN / N, SQUEEZED): a layer by rows, so its products are summed.
    squeezed = [h.mean((2, 3)) @ shard.squeeze.T for h, shard in zip(hidden, shards, strict=True)]
    partials = []
    for peer, shard in enumerate(shards):
        inner = F.silu(added(squeezed) + shard.squeeze_bias)
        gate = torch.sigmoid(inner @ shard.excite.T + shard.excite_bias)
        partials.append(F.conv2d(hidden[peer] * gate[:, :, None, None], shard.project))
    y = x + added(partials)
    (y * coefficients).sum().backward()
    # The residual connection brings the gradient of y once; the region's part is summed over the ranks.
    of_x = coefficients + added(gradient(leaf) for leaf in xs)
    values = {OUTPUT: y, OF_X: of_x, **_gradients(shards[rank])}
    # The bias is whole on every rank, and so is its gradient.
    values["gradient of squeeze_bias"] = added(gradient(shard.squeeze_bias) for shard in shards)
    values |= {"own x": coefficients + gradient(xs[rank]), "partial": x + partials[rank]}
    return {name: value.detach() for name, value in values.items()}


def _block_output(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    """The output alone, computed in one process: what the usual mistakes change."""
    x, _, weights = _inputs(seed)
    parameters = SimpleNamespace(**weights)
    h = F.gelu(F.conv2d(x, parameters.expand))
    h = F.gelu(F.conv2d(h, parameters.depthwise, padding=1, groups=len(parameters.depthwise)))
    squeezed = F.silu(h.mean((2, 3)) @ parameters.squeeze.T + parameters.squeeze_bias)
    gate = torch.sigmoid(squeezed @ parameters.excite.T + parameters.excite_bias)[:, :, None, None]
    return {OUTPUT: x + F.conv2d(h * gate, parameters.project)}


def _gated(edits: str, *names: str) -> Values:
    return only(edited_when_called((_shares,), edits), [OUTPUT, *names])


MBCONV_CHANNELS = TEXTS.exercise(
    "mbconv-channels",
    only(_shares, _NAMES),
    on_ranks=True,
    cases=TENSOR_CASES,
    trial=_convolution_trial,
    source=(_block_output,),
    faults={
        "the gate sees this rank's channels only": _gated("added(squeezed) → squeezed[peer]"),
        "the bias of squeeze is added on every rank": _gated("+ shard.squeeze → + size * shard.squeeze"),
        "no sum in forward": Mistake(only(_shares, {OUTPUT: "partial"}), *NO_FORWARD_SUM),
        "gradient of squeeze from own gates only": _gated(
            "added(squeezed) → _only(squeezed, peer)", "gradient of squeeze"
        ),
        "no sum of x's gradient in backward": Mistake(only(_shares, {OUTPUT: OUTPUT, OF_X: "own x"}), *NO_BACKWARD_SUM),
        "gradient of project times the ranks": Mistake(times_ranks(_shares, "gradient of project"), *COUNTED_AGAIN),
        "the residual connection goes through the region's entry": lambda *case: {
            OUTPUT: _shares(*case)[OUTPUT],
            OF_X: _shares(*case)[OF_X] + (case[1] - 1) * _inputs(case[2])[1],
        },
        "the activation of the convolutions is another one": "F.gelu → F.relu",
        "the activation of squeeze is another one": "F.silu → F.relu",
        "the activation of squeeze is missing": "F.silu →",
        "the gate is not between 0 and 1": "torch.sigmoid →",
        "you add the pixels up": ".mean((2, 3)) → .sum((2, 3))",
        "you take the largest pixel": ".mean((2, 3)) → .amax((2, 3))",
        "the residual connection is missing": "OUTPUT: x + → OUTPUT:",
        "the gate is not used": "h * gate → h",
        "the gate is added": "h * gate → h + gate",
        "x is added on every rank before the sum": lambda rank, size, seed: {
            OUTPUT: _shares(rank, size, seed)[OUTPUT] + (size - 1) * _inputs(seed)[0]
        },
        "the sum over the ranks comes at the wrong place": (
            _gated(
                "F.silu(added(squeezed) + shard.squeeze_bias) → "
                "added(F.silu(part + shard.squeeze_bias) for part in squeezed)"
            ),
            _gated("added(squeezed) → added(h.mean((2, 3)) for h in hidden) @ shard.squeeze.T"),
        ),
        "no gradient through the convolutions": lambda rank, size, seed: {
            OUTPUT: _shares(rank, size, seed)[OUTPUT],
            OF_X: _inputs(seed)[1],
        },
    },
    inspect=refuse_gathers(TEXTS.sentence("mbconv-channels", "channels are gathered on the way")),
)


SIZE = LlamaSize(width=24, depth=1, num_heads=6, num_kv_heads=6, mlp_width=24)
COLUMNS = ("query", "key", "value", "mlp_gate", "mlp_expand")
ROWS = ("attention_project", "mlp_project")
NORMS = ("norm1", "norm2")
PLAN_BATCH, TOKENS = 2, 5


def _block(seed: int) -> Any:
    from dlojz.models.llama import LlamaBlock

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaBlock(SIZE)


def _input(seed: int) -> Tensor:
    return torch.randn(PLAN_BATCH, TOKENS, SIZE.width, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def _plan_trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> tuple[Any, dict[str, Any]]:
    """Apply the plan, go forward and backward; with the bytes that this rank sends on a ring, over those of x."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.distributed.tensor.parallel import parallelize_module

    from dlojz.train.dispatch_trace import StorageTrace, traffic_of

    logging.disable(logging.CRITICAL)  # DTensor tells of a misfit in twenty lines before it raises
    block, x = _block(seed), _input(seed)
    parallelize_module(block, init_device_mesh("cpu", (size,)), answer())
    with StorageTrace({}) as trace:
        with CommDebugMode() as counted:
            y = block(x)
            forward = counted.get_total_counts()
        y.sum().backward()
    # Counted from the collectives that were dispatched, also those that DTensor adds between two layouts.
    sent_ratio = sum(traffic.sent_bytes for traffic in traffic_of(trace.trace.calls, trace.step)) / x.nbytes
    unsharded = [name for name in (*COLUMNS, *ROWS) if not isinstance(getattr(block, name).weight, DTensor)]
    return {"forward": forward, "whole": unsharded, "sent": sent_ratio}, {OUTPUT: y, OF_X: x.grad}


def _plan_expected(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    x = _input(seed)
    y = _block(seed)(x)
    y.sum().backward()
    return {OUTPUT: y.detach(), OF_X: gradient(x)}


def _refuse_no_plan(plan: object) -> Mapping[str, Any]:
    from torch.distributed.tensor.parallel import ParallelStyle

    if not isinstance(plan, Mapping):
        raise TEXTS.wrong("shared", "no dictionary", kind=kind_of(plan))
    layer_names = (*COLUMNS, *ROWS, *NORMS)
    for name, style in plan.items():
        if not any(fnmatch(layer, str(name)) for layer in layer_names):
            raise TEXTS.wrong("shared", "no such layer", name=name, names=", ".join((*COLUMNS, *ROWS)))
        if not isinstance(style, ParallelStyle):
            raise TEXTS.wrong("shared", "no style", name=name, style=style)
    return plan


def _named(plan: Mapping[str, Any]) -> str | None:
    """The layer whose style explains that the block does not compute what it should."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    def style(name: str) -> Any:
        return next((parallel_style for pattern, parallel_style in plan.items() if fnmatch(name, pattern)), None)

    for name in COLUMNS:
        if isinstance(style(name), RowwiseParallel):
            return TEXTS.say("shared", "row-parallel, but reads it whole", name=name)
    for name in ROWS:
        if isinstance(style(name), ColwiseParallel):
            return TEXTS.say("shared", "column-parallel, but reads shards", name=name)
    missing = [name for name in (*COLUMNS, *ROWS) if style(name) is None]
    return _missing(missing) if missing else None


def _missing(names: list[str]) -> str:
    return TEXTS.say("shared", "not in the plan", names=", ".join(names))


def _refuse_whole_layers(answers: list[RankAnswer], size: int) -> None:
    if answers[0].value["whole"]:
        raise Wrong(_missing(answers[0].value["whole"]))


def _plan_inspect(answers: list[RankAnswer], size: int) -> None:
    """The values are right; is all split, with two sums in forward?"""
    _refuse_whole_layers(answers, size)
    if answers[0].value["forward"] > 2:
        raise TEXTS.wrong("parallelize-plan", "other communication in forward", forward=answers[0].value["forward"])


class _PlanJudge(Judge):
    """Run the plan on ranks; where values are wrong, name the layer that explains it."""

    def __call__(self, answer: Callable[..., Any]) -> None:
        import torch.distributed.tensor.debug
        import torch.distributed.tensor.parallel  # noqa: F401 - here, once, for all ranks

        plan = _refuse_no_plan(answer())
        try:
            super().__call__(answer)
        except Wrong:
            if (explanation := _named(plan)) is not None:
                raise Wrong(explanation) from None
            raise


PARALLELIZE_PLAN = TEXTS.judged(
    "parallelize-plan",
    _PlanJudge(_plan_expected, on_ranks=True, trial=_plan_trial, cases=((2, 11),), inspect=_plan_inspect),
)


class _SendingJudge:
    """Run the plan on two ranks; its score is what a rank sends, over the bytes of x."""

    on_ranks = True
    cases = ((2, 12),)

    def __call__(self, answer: Callable[..., Any]) -> float:
        ratios: list[float] = []

        def inspect(answers: list[RankAnswer], size: int) -> None:
            _refuse_whole_layers(answers, size)
            ratios.append(max(rank_answer.value["sent"] for rank_answer in answers))

        _PlanJudge(_plan_expected, on_ranks=True, trial=_plan_trial, cases=self.cases, inspect=inspect)(answer)
        return max(ratios)


FEWEST_BYTES = TEXTS.challenge("fewest-bytes", _SendingJudge(), target=4.0)


LayerBytes = Callable[[int, int, int, int, int], float]
CASES = ((1, 2048, 12288, 8, 2), (4, 128, 128, 2, 4), (2, 1024, 4096, 4, 2))


def layer_bytes(samples: int, tokens: int, width: int, ranks: int, number_bytes: int) -> float:
    """Bytes that each rank sends for one transformer layer and one micro-batch, forward and backward.

    Four all-reduces of (B, T, D), each of which sends 2(n − 1)/n of its message.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), §3.2, eq. for 8·b·s·h·(t − 1)/t elements.
    """
    return 4 * samples * tokens * width * number_bytes * 2 * (ranks - 1) / ranks


def layer_seconds(
    samples: int,
    tokens: int,
    width: int,
    ranks: int,
    number_bytes: int,
    link: Link,
    sent_bytes: LayerBytes = layer_bytes,
) -> float:
    """Time of the same four ring all-reduces over links of one kind; nothing hides them, as each is waited for.

    Args:
        sent_bytes: what a rank sends for the layer, by the same arguments; the student's function.
    """
    # 4 × 2 (p − 1) latencies, and the bytes over the bandwidth: the cost of four rings, of messages of these bytes.
    message_bytes = sent_bytes(samples, tokens, width, ranks, number_bytes) * ranks / (4 * 2 * (ranks - 1))
    beta = 1 / link.bytes_per_s
    return 4 * cost_s("ring_all_reduce", message_bytes, ranks, alpha_s=link.latency_s, beta_s_per_byte=beta)


def compute_seconds(samples: int, tokens: int, width: int, ranks: int, flops_per_s: float) -> float:
    """Time of the layer's matrix products on each rank, forward and backward.

    72·B·T·D²·(1 + T/(6D)) operations over the ranks, without recomputation.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), appendix: 24·b·s·h²(1 + s/(6h)) in forward, twice that backward.
    """
    return 72 * samples * tokens * width**2 * (1 + tokens / (6 * width)) / ranks / flops_per_s


LAYER_BYTES = TEXTS.exercise(
    "layer-bytes",
    layer_bytes,
    cases=lambda: CASES,
)
