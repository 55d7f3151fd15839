"""Measure a GPU's kernels and its host, apart from each other, in less than a minute: all that a step is made of.

Each case is an operation of PyTorch, forward and backward. The GPU is put to sleep, some calls are launched, and it
wakes up: its own clock then tells the seconds of the kernels alone, however slowly they were launched, and the
processor's clock the seconds that the launches took, however long the kernels are. Calls have tensors of their own, so
that nothing is added up between them.

    kind      seconds of                                                       size
    kernel    one call on the GPU                                              of the case (below)
    host      launching one call, with autograd and what is around it          of the case
    level     a block of tiny layers by what its backward computes again       layers of the block

Sizes: products m, n, k; convolutions images, channels in and out, side, kernel, stride, groups; attention samples,
heads, tokens, width of a head, causal or not (1 or 0), bias or not; embeddings tokens, words, width; updates tensors
and elements of each; everything else the shape of its input.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from dlojz.cost_model.measuring import LEAST_S, Timed
from dlojz.hardware import Precision
from dlojz.hardware.gpus import AttentionKernel

if TYPE_CHECKING:
    from dlojz.models.checkpointing import Checkpointing

MOST_CALLS: Final = 16
"""Launched at once: a GPU's queue holds about a thousand kernels, and a host that finds it full waits."""
SET_BYTES: Final = 2**29
"""Of the tensors of all calls, about."""
ROUNDS: Final = 3
CYCLES_PER_S: Final = 2e9
"""Of a GPU's clock, at most: sleep is asked for in cycles."""
LONG_S: Final = 0.01
"""A call that takes longer is measured by itself, once more."""

WIDTHS: Final = (384, 768, 1024, 2048)
ROWS: Final = (256, 1024, 4096, 8192)
SHAPES: Final = ((3, 1), (4, 1), (1, 4), (1, 1))
"""Columns and inner size of a product, in widths: those of a transformer's layers."""
ODD_PRODUCTS: Final = ((6304, 2304, 768), (12608, 1536, 384), (3152, 4096, 1024), (4096, 32768, 768),
                       (4096, 50257, 768), (32, 1000, 768), (197, 3072, 768), (1024, 5632, 2048), (1024, 256, 2048),
                       (50176, 96, 96), (64, 256, 64))  # fmt: skip
"""Rows that fill no tile, a vocabulary, few rows, narrow layers."""
ELEMENTS: Final = (2**10, 2**14, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26)
CURVES: Final = (2**14, 2**20, 2**22, 2**25)
NORMED: Final = ((256, 768), (8192, 384), (8192, 768), (4096, 1024), (4096, 2048), (6272, 768), (25088, 192),
                 (100352, 96))  # fmt: skip
IMAGES: Final = ((32, 64, 112), (32, 96, 56), (32, 384, 56), (32, 768, 28), (8, 512, 28), (1, 256, 28))
"""Images, channels and side: of batch norms and pooling."""
CONVOLUTIONS: Final = ((32, 3, 64, 224, 3, 2, 1), (32, 64, 64, 112, 3, 1, 1), (32, 128, 128, 56, 3, 1, 1),
                       (32, 256, 256, 28, 3, 1, 1), (32, 96, 384, 56, 1, 1, 1), (32, 384, 96, 56, 1, 1, 1),
                       (32, 192, 768, 28, 1, 1, 1), (32, 768, 192, 28, 1, 1, 1), (8, 256, 1024, 28, 1, 1, 1),
                       (8, 1024, 256, 28, 1, 1, 1), (1, 512, 2048, 28, 1, 1, 1), (1, 2048, 512, 28, 1, 1, 1),
                       (32, 3, 768, 224, 16, 16, 1), (1, 64, 64, 112, 3, 1, 1), (1, 96, 384, 56, 1, 1, 1),
                       (32, 384, 384, 56, 3, 1, 384), (32, 256, 256, 112, 3, 2, 256), (32, 768, 768, 28, 3, 1, 768),
                       (32, 384, 384, 56, 3, 2, 384), (8, 1024, 1024, 28, 3, 1, 1024), (1, 2048, 2048, 28, 3, 1, 2048),
                       (1, 384, 384, 56, 3, 1, 384))  # fmt: skip
ATTENTIONS: Final = ((32, 12, 197, 64, 0, 0), (64, 6, 197, 64, 0, 0), (16, 16, 197, 64, 0, 0), (1, 12, 197, 64, 0, 0),
                     (4, 12, 1024, 64, 1, 0), (2, 16, 1024, 64, 1, 0), (1, 32, 1024, 64, 1, 0), (8, 16, 512, 64, 1, 0),
                     (4, 16, 1024, 128, 1, 0), (32, 12, 196, 32, 0, 1), (32, 24, 49, 32, 0, 1), (8, 24, 196, 32, 0, 1),
                     (1, 48, 196, 32, 0, 1), (1, 96, 49, 32, 0, 1))  # fmt: skip
FUSED: Final = ((1, 4, 1024, 64), (1, 16, 16384, 64), (1, 16, 16384, 128))
"""Samples, heads, tokens and width of a causal attention by one named kernel each."""
FUSED_KERNELS: Final[dict[AttentionKernel, str]] = {"flash2": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
"""Kernels of fused attention that torch can be told to take, and its names for them."""
SUSTAINED: Final = "linear, sustained"
SUSTAINED_SIDE: Final = 8192
SUSTAINED_S: Final = 3.0
"""Of products, after which a GPU's clock has come down to what its power allows."""
LOGITS: Final = ((4096, 50257), (1024, 50257), (1024, 32000), (32, 1000))
EMBEDDINGS: Final = ((4096, 50257, 768), (1024, 50257, 1024), (1024, 32000, 2048))
UPDATES: Final = ((32, 256), (32, 2**16), (32, 2**20), (8, 2**23))
FORMS: Final = ("for_loop", "foreach", "fused")
APART: Final = "one by one"
BLOCKS: Final = 6
LEVEL_LAYERS: Final = (1, 5)
TINY: Final = 8

PRECISIONS: Final[tuple[Precision, ...]] = ("fp32", "bf16")

Made = tuple[Sequence[Any], Callable[..., Any]]
"""The tensors of a call that need gradients, and what is called with them."""


class KernelCase(NamedTuple):
    """One operation, of one size.

    Attributes:
        size: as the table above says.
        num_bytes: of a call's tensors, about.
        backward: whether its backward is timed too.
    """

    label: str
    size: tuple[int, ...]
    precision: Precision
    num_bytes: float
    make: Callable[[], Made]
    backward: bool = True


def measure_kernels(device: Any, *, small: bool = False, rounds: int = ROUNDS) -> list[Timed]:
    """Time all cases on the device.

    Args:
        device: a GPU; on the CPU, which does not launch ahead, both times are those of the calls.
        small: only the smallest sizes of each, to try the code.
        rounds: how often each is timed, at least 1; the median counts.
    """
    import torch

    timings: list[Timed] = []
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they were
        for case in cases(device, small=small):
            # A kernel that this version lacks, or that does not fit the memory, is not measured.
            with suppress(RuntimeError, NotImplementedError):
                timings += _of_case(case, device, rounds)
    timings += _updates(device, small, rounds)
    timings += _levels(device, rounds)
    return [*timings, _sustained(device, small)]


def cases(device: Any, *, small: bool = False) -> Iterator[KernelCase]:
    """All cases but those of updates and recomputation."""
    makers = (_products, _passes, _norms, _images, _convolutions, _attentions, _fused, _texts, _hosts)
    for maker, precision in itertools.product(makers, PRECISIONS):
        labels: set[str] = set()
        for case in maker(_Tensors(device, precision)):
            if not small:
                yield case
            elif case.label not in labels and case.num_bytes < 2**23:  # one small case per label
                labels.add(case.label)
                yield case


class _Tensors:
    """Makes tensors of a precision on a device."""

    def __init__(self, device: Any, precision: Precision) -> None:
        import torch

        self.device, self.precision = device, precision
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self.bytes = 2 if precision == "bf16" else 4

    def __call__(self, *shape: int, full: bool = False, needs: bool = True) -> Any:
        """A tensor of random numbers; in fp32 with `full`."""
        import torch

        tensor = torch.randn(*shape, device=self.device, dtype=torch.float32 if full else self.dtype)
        return tensor.requires_grad_(needs)


def _products(new: _Tensors) -> Iterator[KernelCase]:
    """A linear layer's three products, each with the layout in memory that torch calls it with."""
    import torch

    grid = [(rows, n * width, k * width) for rows in ROWS for width in WIDTHS for n, k in SHAPES]
    for m, n, k in (*grid, *ODD_PRODUCTS):
        num_bytes = new.bytes * (m * k + n * k + m * n)

        # Defaults bind this turn's sizes: the tensors are made later.
        def forward(m: int = m, n: int = n, k: int = k) -> Made:
            bias = new(n, needs=False)
            # (m, k) @ (n, k)ᵀ + (n)
            return (new(m, k, needs=False), new(n, k, needs=False)), lambda x, weight: torch.addmm(bias, x, weight.t())

        def of_input(m: int = m, n: int = n, k: int = k) -> Made:
            return (new(m, n, needs=False), new(n, k, needs=False)), torch.mm  # gradient (m, n) @ weight (n, k)

        def of_weight(m: int = m, n: int = n, k: int = k) -> Made:
            # Gradient (m, n)ᵀ @ x (m, k).
            return (new(m, n, needs=False), new(m, k, needs=False)), lambda gradient, x: torch.mm(gradient.t(), x)

        yield KernelCase("linear", (m, n, k), new.precision, num_bytes, forward, backward=False)
        yield KernelCase("linear, of input", (m, k, n), new.precision, num_bytes, of_input, backward=False)
        yield KernelCase("linear, of weight", (n, k, m), new.precision, num_bytes, of_weight, backward=False)


def _passes(new: _Tensors) -> Iterator[KernelCase]:
    """What reads and writes every element: sums, casts, curves, sums over rows."""
    import torch
    import torch.nn.functional as F

    target_dtype = torch.float32 if new.precision == "bf16" else torch.bfloat16
    for elements in ELEMENTS:
        size = new.bytes * elements

        def added(elements: int = elements) -> Made:
            return (new(elements, needs=False), new(elements, needs=False)), torch.add

        def cast(elements: int = elements) -> Made:
            return (new(elements, needs=False),), lambda x: x.to(target_dtype)

        yield KernelCase("add", (elements,), new.precision, 3 * size, added, False)  # two read, one written
        yield KernelCase("cast", (elements,), new.precision, 3 * size, cast, False)
    curves: tuple[tuple[str, Callable[..., Any]], ...] = (
        ("gelu", F.gelu), ("silu", F.silu), ("sigmoid", torch.sigmoid),
    )  # fmt: skip
    for elements, (name, curve) in itertools.product(CURVES, curves):
        make = lambda elements=elements, curve=curve: ((new(elements),), curve)  # noqa: E731
        yield KernelCase(name, (elements,), new.precision, 4 * new.bytes * elements, make)
    for rows, columns in NORMED:
        size = new.bytes * rows * columns
        shape = (rows, columns)
        summed = lambda shape=shape: ((new(*shape, needs=False),), lambda x: x.sum(0))  # noqa: E731
        yield KernelCase("sum of rows", shape, new.precision, size, summed, False)


def _norms(new: _Tensors) -> Iterator[KernelCase]:
    import torch.nn.functional as F

    for rows, columns in NORMED:

        def make(rows: int = rows, columns: int = columns) -> Made:
            return (new(rows, columns), new(columns), new(columns)), lambda x, *gain: F.layer_norm(x, (columns,), *gain)

        yield KernelCase("layer norm", (rows, columns), new.precision, 5 * new.bytes * rows * columns, make)


def _images(new: _Tensors) -> Iterator[KernelCase]:
    """Batch norms (weights in fp32) and pooling."""
    import torch
    import torch.nn.functional as F

    for images, channels, side in IMAGES:
        shape = (images, channels, side, side)
        num_bytes = 5.0 * new.bytes * images * channels * side * side

        def normed(shape: tuple[int, ...] = shape) -> Made:
            mean, variance = (torch.ones(shape[1], device=new.device) for _ in range(2))
            call = lambda x, gain, bias: F.batch_norm(x, mean, variance, gain, bias, training=True)  # noqa: E731
            return (new(*shape), new(shape[1], full=True), new(shape[1], full=True)), call

        def pooled(shape: tuple[int, ...] = shape) -> Made:
            return (new(*shape),), lambda x: F.avg_pool2d(x, 2)

        calls = (("batch norm", normed), ("pool", pooled))
        yield from (KernelCase(name, shape, new.precision, num_bytes, make) for name, make in calls)


def _convolutions(new: _Tensors) -> Iterator[KernelCase]:
    import torch.nn.functional as F

    for images, inside, outside, side, kernel, stride, groups in CONVOLUTIONS:
        size = (images, inside, outside, side, kernel, stride, groups)
        num_bytes = 3.0 * new.bytes * images * side**2 * (inside + outside / stride**2)

        def make(size: tuple[int, ...] = size) -> Made:
            images, inside, outside, side, kernel, stride, groups = size
            # The image itself needs no gradient.
            x, weight = (
                new(images, inside, side, side, needs=inside > 3),
                new(outside, inside // groups, kernel, kernel),
            )
            padding = kernel // 2 if stride < kernel else 0  # patches of an image have no padding
            call = lambda x, weight: F.conv2d(x, weight, None, stride, padding, groups=groups)  # noqa: E731
            return (x, weight), call

        yield KernelCase("convolution", size, new.precision, num_bytes, make)


def _attentions(new: _Tensors) -> Iterator[KernelCase]:
    """Attention as torch chooses its kernel."""
    import torch.nn.functional as F

    for samples, heads, tokens, width, causal, biased in ATTENTIONS:
        size = (samples, heads, tokens, width, causal, biased)
        # Queries to output and their gradients; a bias has (heads, tokens, tokens).
        num_bytes = (
            8.0 * new.bytes * samples * heads * tokens * width + new.bytes * samples * heads * tokens**2 * biased
        )

        def make(size: tuple[int, ...] = size) -> Made:
            samples, heads, tokens, width, causal, biased = size
            parts = [new(samples, tokens, heads, width) for _ in range(3)]  # heads are split off a row of the product
            masks = [new(heads, tokens, tokens)] if biased else []

            def call(*arguments: Any) -> Any:
                q, k, v = (tensor.transpose(1, 2) for tensor in arguments[:3])
                mask = arguments[3] if biased else None
                return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=bool(causal))

            return (*parts, *masks), call

        yield KernelCase("attention", size, new.precision, num_bytes, make)


def _fused(new: _Tensors) -> Iterator[KernelCase]:
    """Attention by each fused kernel, at long sequences: the rates that a GPU's file holds."""
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for size, kernel in itertools.product(FUSED if new.precision == "bf16" else (), FUSED_KERNELS):

        def make(size: tuple[int, ...] = size, kernel: AttentionKernel = kernel) -> Made:
            def call(q: Any, k: Any, v: Any) -> Any:
                with sdpa_kernel(getattr(SDPBackend, FUSED_KERNELS[kernel])):
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True)

            return tuple(new(*size) for _ in range(3)), call

        num_bytes = 8.0 * new.bytes * math.prod(size)
        yield KernelCase(f"attention, {kernel}", (*size, 1, 0), new.precision, num_bytes, make)


def _texts(new: _Tensors) -> Iterator[KernelCase]:
    """Loss and embedding; the weights of the latter are in fp32 always."""
    import torch
    import torch.nn.functional as F

    for shape in LOGITS:

        def compared(shape: tuple[int, int] = shape) -> Made:
            targets = torch.randint(shape[1], shape[:1], device=new.device)
            return (new(*shape),), lambda logits: F.cross_entropy(logits.float(), targets)

        yield KernelCase("loss", shape, new.precision, 4.0 * new.bytes * shape[0] * shape[1], compared)
    for tokens, words, width in EMBEDDINGS if new.precision == "fp32" else ():

        def looked_up(tokens: int = tokens, words: int = words, width: int = width) -> Made:
            numbers = torch.randint(words, (tokens,), device=new.device)
            return (new(words, width),), lambda weight: F.embedding(numbers, weight)

        yield KernelCase("embedding", (tokens, words, width), "fp32", 8.0 * words * width, looked_up)


def _hosts(new: _Tensors) -> Iterator[KernelCase]:
    """A view, which has no kernel."""
    if new.precision == "fp32":
        yield KernelCase("view", (TINY,), "fp32", 1024.0, lambda: ((new(TINY, TINY),), lambda x: x.view(-1)), False)


def _of_case(case: KernelCase, device: Any, rounds: int) -> Iterator[Timed]:
    """Time a case: kernels and host, forward and backward."""
    import torch

    calls = MOST_CALLS if device.type == "cuda" else 2
    # A set of tensors per call, as many as SET_BYTES hold, one at least.
    sets = [case.make() for _ in range(int(min(calls, max(1, SET_BYTES // max(case.num_bytes, 1)))))]

    def forward() -> list[Any]:
        return [call(*leaves) for leaves, call in sets]

    yield from _timed(case.label, case.size, case.precision, forward, device, len(sets), rounds)
    if not case.backward:
        return
    outputs = forward()
    # One gradient stands for all outputs, which have one shape.
    gradients = [torch.ones_like(output) for output in outputs[:1]] * len(outputs)
    leaves = [leaf for inputs, _ in sets for leaf in inputs if leaf.requires_grad]

    def backward() -> None:
        torch.autograd.grad(outputs, leaves, gradients, retain_graph=True)  # retained: the same backward is timed again

    yield from _timed(f"{case.label}, backward", case.size, case.precision, backward, device, len(sets), rounds)


def _timed(
    label: str,
    size: tuple[int, ...],
    precision: Precision,
    call: Callable[[], Any],
    device: Any,
    calls: int,
    rounds: int,
) -> Iterator[Timed]:
    """Both times of a call that stands for several, as a `kernel` and as a `host`."""
    for kind, seconds in zip(("kernel", "host"), both_s(call, device, rounds), strict=True):
        yield Timed(kind, size, max(seconds / calls, LEAST_S), label, precision)  # per call


def both_s(call: Callable[[], Any], device: Any, rounds: int = ROUNDS) -> tuple[float, float]:
    """Seconds of a call's kernels, and of launching them: medians of some rounds, after a first call."""
    import torch

    if device.type != "cuda":
        seconds = [_wall_s(call) for _ in range(rounds + 1)][1:]  # the first is a warm-up
        return statistics.median(seconds), statistics.median(seconds)
    call()
    torch.cuda.synchronize()
    launched_s = _wall_s(call)  # about how long to sleep
    torch.cuda.synchronize()
    rounds_s: list[tuple[float, float]] = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Longer than the launches take, 50 ms at most.
        torch.cuda._sleep(int(CYCLES_PER_S * min(2 * launched_s + 5e-4, 0.05)))
        begin.record()
        launched_s = _wall_s(call)
        end.record()
        torch.cuda.synchronize()
        rounds_s.append((begin.elapsed_time(end) / 1e3, launched_s))  # the event's clock counts milliseconds
        if rounds_s[0][0] > LONG_S and len(rounds_s) > 1:  # a long call is steady: two rounds are enough
            break
    return statistics.median(kernel_s for kernel_s, _ in rounds_s), statistics.median(host_s for _, host_s in rounds_s)


def _wall_s(call: Callable[[], Any]) -> float:
    start_s = time.perf_counter()
    result = call()
    took_s = time.perf_counter() - start_s
    del result  # released only now: freeing is not timed
    return took_s


def _updates(device: Any, small: bool, rounds: int) -> Iterator[Timed]:
    """Each form of each optimizer's update, and AdamW with an optimizer for each tensor, as within the passes."""
    import torch

    kinds: dict[str, Callable[..., Any]] = {
        "adamw": partial(torch.optim.AdamW, lr=1e-6),
        "momentum": partial(torch.optim.SGD, lr=1e-6, momentum=0.9, weight_decay=0.1),
        "sgd": partial(torch.optim.SGD, lr=1e-6, weight_decay=0.1),
    }
    combinations = [*itertools.product(kinds, FORMS), ("adamw", APART)]
    for (tensors, elements), (kind, form) in itertools.product(UPDATES[:1] if small else UPDATES, combinations):
        parameters = [torch.randn(elements, device=device, requires_grad=True) for _ in range(tensors)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        new_optimizer = partial(kinds[kind], foreach=form == "foreach", fused=form == "fused")
        # With an optimizer each, or all in one.
        optimizers = (
            [new_optimizer([parameter]) for parameter in parameters] if form == APART else [new_optimizer(parameters)]
        )

        def update(optimizers: Iterable[Any] = optimizers) -> None:
            for optimizer in optimizers:
                optimizer.step()

        yield from _timed(f"update: {kind}, {form}", (tensors, elements), "fp32", update, device, 1, rounds)


def tiny_blocks(layers: int, device: Any) -> tuple[list[Any], Any]:
    """Make blocks of so many layers, whose kernels take next to nothing, and their input."""
    import torch
    from torch import nn

    with device:
        parts = [nn.Sequential(nn.LayerNorm(TINY), nn.Linear(TINY, TINY), nn.GELU()) for _ in range(layers * BLOCKS)]
    # BLOCKS blocks of `layers` layers.
    blocks = [nn.Sequential(*parts[start : start + layers]) for start in range(0, len(parts), layers)]
    return blocks, torch.randn(4, TINY, device=device, requires_grad=True)


def tiny_step(blocks: Sequence[Any], x: Any, level: Checkpointing, precision: Precision) -> None:
    """Compute forward and backward of such blocks."""
    import torch

    from dlojz.models.checkpointing import run_checkpointed

    y = x
    with torch.autocast(x.device.type, torch.bfloat16, enabled=precision == "bf16"):
        for block in blocks:
            y = block(y) if level == "none" else run_checkpointed(block, y, level)
    y.float().sum().backward()


def _sustained(device: Any, small: bool) -> Timed:
    """Time a large product after seconds of the same: a GPU at its power limit clocks lower than in a short call."""
    import torch

    side = TINY if small else SUSTAINED_SIDE
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))

    def products() -> float:
        start_s = time.perf_counter()
        for _ in range(MOST_CALLS):
            torch.mm(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start_s) / MOST_CALLS

    until_s = time.perf_counter() + (0.0 if small else SUSTAINED_S)
    while time.perf_counter() < until_s:
        products()
    return Timed("kernel", (side, side, side), products(), SUSTAINED, "bf16")


def _levels(device: Any, rounds: int) -> Iterator[Timed]:
    """A forward and backward of tiny blocks, for each level of checkpointing."""
    import torch

    from dlojz.models.checkpointing import LEVELS

    for layers, level, precision in itertools.product(LEVEL_LAYERS, LEVELS, PRECISIONS):
        blocks, x = tiny_blocks(layers, device)

        def step(
            blocks: list[Any] = blocks, x: Any = x, level: Checkpointing = level, precision: Precision = precision
        ) -> None:
            tiny_step(blocks, x, level, precision)
            if device.type == "cuda":
                torch.cuda.synchronize()
            for block in blocks:
                block.zero_grad()

        step()
        seconds = statistics.median(_wall_s(step) for _ in range(3 * rounds))  # short steps: three times as many rounds
        yield Timed("level", (layers,), seconds / BLOCKS, level, precision)  # per block
