"""Measure a machine for the cost model, about a minute: products, passes, launches, updates, messages, engines.

Every rank makes the same calls in the same order, and all are busy while one is timed, so that ranks which share cores,
or the memory's bandwidth, are measured sharing them. A short call is repeated for a window of time, and the median of
the windows' means counts: a single call of a rank that takes turns on a core would mostly fall between two turns.

A chain (norm, linear, GELU, linear) takes turns with the same operations, each on separate tensors. An engine's
cost is that of a wrapped model minus the same model bare, on blocks that compute next to nothing:

    kind        what is measured                                                         size
    checkpoint  a block whose forward is done again in backward                          blocks, tensors
    ddp         hooks, copies into buckets, one message                                  blocks, tensors
    fsdp2       a block's weights gathered once, its gradients scattered (ZeRO-2)        blocks, tensors
    fsdp3       the same, gathered twice (ZeRO-3)                                        blocks, tensors
    dtensor     a pair of layers split by columns and rows: two messages                 messages
    meeting     an all-reduce between two computations: ranks that waited for a message  nothing, or 2
                wake up, and none begins before the last has come; of all ranks, and
                of pairs while all are busy, as tensor parallelism on 2 of 4 ranks has it
    straggler   a meeting of all ranks after longer work, in which they come apart       work in µs
                further: DDP has one such after all its computation
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from dlojz.by_hand.collectives.running import TimedMessage, measure
from dlojz.hardware import Precision

PRODUCTS: Final = ((512, 128, 128), (2048, 128, 128), (2048, 512, 128), (2048, 128, 512), (1024, 352, 128),
                   (512, 256, 256), (512, 512, 512), (1024, 1024, 1024))  # fmt: skip
"""Rows, columns and inner size: from a small decoder's layers to sizes at which a core is at its best."""
ATTENTION: Final = ((128, 128, 32, 16), (64, 64, 16, 64), (256, 256, 64, 8))
"""The same of products of attention, with how many at once."""
CONVOLUTIONS: Final = ((3, 8, 64, 3), (8, 32, 32, 1), (32, 16, 32, 1), (16, 64, 32, 1), (64, 32, 16, 1),
                       (64, 128, 8, 1), (32, 32, 16, 3), (64, 64, 28, 3))  # fmt: skip
"""Channels in and out, side and kernel, of 8 images."""
IMAGES: Final = 8
PASSES: Final = (2**16, 2**18, 2**20)
"""Elements of a tensor that is read and written."""
PRODUCTS_ON_GPU: Final = ((1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096), (8192, 4096, 4096),
                          (8192, 12288, 4096), (8192, 8192, 8192))  # fmt: skip
ATTENTION_ON_GPU: Final = ((1024, 1024, 64, 64), (1024, 64, 1024, 64), (4096, 4096, 128, 8))
CONVOLUTIONS_ON_GPU: Final = ((64, 64, 56, 3), (128, 128, 28, 3), (256, 256, 14, 3), (96, 384, 56, 1),
                              (384, 1536, 14, 1))  # fmt: skip
IMAGES_ON_GPU: Final = 64
PASSES_ON_GPU: Final = (2**24, 2**26, 2**27)
"""Beyond what the caches of a GPU hold."""
HALF: Final = ((512, 512, 512), (2048, 128, 128))
"""Products that are timed in bf16 too; on a GPU all of them are."""
UPDATES: Final = ((8, 256), (64, 256), (8, 65536), (64, 16384))
"""Tensors and elements of each."""
UPDATES_ON_GPU: Final = (*UPDATES, (8, 2**23), (64, 2**21))
MESSAGES: Final = (2**10, 2**14, 2**17, 2**20, 2**22)
COLLECTIVES: Final = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
LEAST_REPEATS: Final = 11
WINDOW_S: Final = 0.04
WINDOWS: Final = 3
CHAIN: Final = 12
"""Operations between two looks at the clock, where a launch is timed."""


class Timed(NamedTuple):
    """One measurement of computation; as JSON the list of its parts.

    Attributes:
        what: `product`, `attention`, `convolution`, `pass`, `launch`, `update`, `sharded` for the update of tensors of
            which each rank holds a part (DTensor), or a kind of `dlojz.cost_model.measuring`.
        size: of a product m, n, k, times; of a convolution the product that it comes to, and groups; of a pass bytes;
            of an update tensors and elements of each; of a launch nothing; of an engine its blocks and tensors; of
            what `measuring_kernels` measures as it says.
        seconds: of one; of a convolution, a third of forward and backward; of an engine what it adds.
        label: as a figure shows it.
    """

    what: str
    size: tuple[int, ...]
    seconds: float
    label: str
    precision: Precision = "fp32"


def measure_rank(
    *, windows: int = WINDOWS, window_s: float = WINDOW_S, tell: Callable[[int, int], None] | None = None
) -> tuple[list[Timed], list[TimedMessage]]:
    """Measure computation and messages on this rank, together with all others of its process group.

    Args:
        windows: how often each engine is timed, at least 1; computations are timed `WINDOWS` times in any case, as a
            single one may fall into another process's turn.
        window_s: seconds of each.
        tell: called before each measurement, with how many are done and how many there are.

    Returns:
        What this rank measured of computation, and the messages' points, the same on every rank.
    """
    import torch

    ranks = _ranks()
    device = torch.device("cuda", torch.cuda.current_device()) if _on_gpu() else torch.device("cpu")
    work = list(_computations(device, ranks))
    engines = 0 if device.type == "cuda" else count_engines(ranks)  # a GPU's host runs ahead of it
    total = len(work) + engines + (len(COLLECTIVES) + 1 if ranks > 1 else 0)
    timings = []
    for number, (timed, call) in enumerate(work):
        if tell:
            tell(number, total)
        (seconds,) = _by_turns((call,), window_s, device)
        # `timed.seconds`: the share of a call that is one.
        timings.append(timed._replace(seconds=seconds * timed.seconds))
    if engines:
        counter = itertools.count(len(work))
        timings += measure_engines(
            windows=windows, window_s=window_s, tell=(lambda: tell(next(counter), total)) if tell else None
        )
    points: list[TimedMessage] = []
    if ranks > 1:
        for number, collective in enumerate(COLLECTIVES):
            if tell:
                tell(len(work) + engines + number, total)
            points += measure(collective, MESSAGES, repeats=max(LEAST_REPEATS, 5 * windows), warmup=2)
        points += _neighbours(device, max(LEAST_REPEATS, 5 * windows))
    if tell:
        tell(total, total)
    return timings, points


def _ranks() -> int:
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_initialized() else 1


def _on_gpu() -> bool:
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        return "nccl" in str(dist.get_backend())
    return torch.cuda.is_available()


def _by_turns(calls: Sequence[Callable[[], Any]], window_s: float, device: Any) -> list[float]:
    """Seconds of each call, mean of the ranks, median of `WINDOWS` windows, in which the calls take turns."""
    import torch
    import torch.distributed as dist

    windows = [[_window_s(call, window_s, device) for call in calls] for _ in range(WINDOWS)]
    seconds = torch.tensor(windows, dtype=torch.float64, device=device)
    if _ranks() > 1:
        # Who: all ranks. What: their seconds, of which the means count. How much: 8 bytes per call and window.
        dist.all_reduce(seconds)
    median_s: list[float] = (seconds / _ranks()).median(dim=0).values.tolist()
    return median_s


def _window_s(call: Callable[[], Any], window_s: float, device: Any) -> float:
    """Mean seconds of one call during a window that all ranks begin together; on a GPU by its own clock."""
    import torch.distributed as dist

    call()  # not timed: allocations, first choices of a kernel
    if _ranks() > 1:
        # Who: all ranks. What: nothing but that each is there. How much: a few bytes.
        dist.barrier()
    if device.type == "cuda":
        return _window_on_gpu_s(call, window_s)
    count, start_s = 0, time.perf_counter()
    while (took_s := time.perf_counter() - start_s) < window_s:
        call()
        count += 1
    return took_s / count  # ends after the call that passes the window


def _window_on_gpu_s(call: Callable[[], Any], window_s: float) -> float:
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    count = 8
    while True:
        begin.record()
        for _ in range(count):
            call()
        end.record()
        torch.cuda.synchronize()
        took_s = begin.elapsed_time(end) / 1e3
        if took_s >= window_s / 2:  # long enough for the clock's resolution
            return float(took_s) / count
        count *= 4  # again, with four times as many


def _computations(device: Any, ranks: int) -> Iterator[tuple[Timed, Callable[[], Any]]]:
    """What is timed, and the call; `seconds` is the share of a call's time that is one."""
    yield from _products(device)
    yield from _convolutions(device)
    yield from _passes(device)
    yield from _launches(device)
    yield from _updates(device)
    if ranks > 1:
        yield from _sharded(device, ranks)


def _products(device: Any) -> Iterator[tuple[Timed, Callable[[], Any]]]:
    import torch

    def times(call: Callable[[Any, Any], Any], lhs: Any, rhs: Any) -> Callable[[], Any]:
        return lambda: call(lhs, rhs)

    on_gpu = device.type == "cuda"
    sizes = PRODUCTS_ON_GPU if on_gpu else PRODUCTS
    sizes_by_precision: list[tuple[Precision, Any]] = [("fp32", sizes), ("bf16", sizes if on_gpu else HALF)]
    for precision, precision_sizes in sizes_by_precision:
        kind = torch.bfloat16 if precision == "bf16" else torch.float32
        for m, n, k in precision_sizes:
            lhs, rhs = torch.randn(m, k, device=device, dtype=kind), torch.randn(k, n, device=device, dtype=kind)
            yield Timed("product", (m, n, k, 1), 1.0, f"{m}×{n}×{k}", precision), times(torch.mm, lhs, rhs)
        # On a CPU attention is timed in fp32 alone.
        for m, n, k, heads in ATTENTION_ON_GPU if on_gpu else ATTENTION if precision == "fp32" else ():
            lhs = torch.randn(heads, m, k, device=device, dtype=kind)
            rhs = torch.randn(heads, k, n, device=device, dtype=kind)
            label = f"{heads}×({m}×{n}×{k})"
            yield Timed("attention", (m, n, k, heads), 1.0, label, precision), times(torch.bmm, lhs, rhs)


def _convolutions(device: Any) -> Iterator[tuple[Timed, Callable[[], Any]]]:
    import torch
    import torch.nn.functional as F

    on_gpu = device.type == "cuda"
    images = IMAGES_ON_GPU if on_gpu else IMAGES
    precisions: tuple[Precision, ...] = ("fp32", "bf16") if on_gpu else ("fp32",)
    sizes = CONVOLUTIONS_ON_GPU if on_gpu else CONVOLUTIONS
    for precision, (inside, outside, side, kernel) in itertools.product(precisions, sizes):
        make = partial(torch.randn, device=device, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
        x = make(images, inside, side, side, requires_grad=True)
        weight = make(outside, inside, kernel, kernel, requires_grad=True)
        gradient = make(images, outside, side, side)

        def call(x: Any = x, weight: Any = weight, gradient: Any = gradient, padding: int = kernel // 2) -> None:
            torch.autograd.grad(F.conv2d(x, weight, padding=padding), (x, weight), gradient)

        # As a product: rows are pixels of all images, columns channels out, the inner size a patch of the input.
        size = (images * side * side, outside, inside * kernel * kernel, 1)
        label = f"{inside}→{outside} {side}² {kernel}×{kernel}"
        # 1/3: forward and two gradients are three such products.
        yield Timed("convolution", size, 1 / 3, label, precision), call


def _passes(device: Any) -> Iterator[tuple[Timed, Callable[[], Any]]]:
    """Forward and backward of what stands between the products; bytes as the cost model counts them, in fp32."""
    import torch
    import torch.nn.functional as F

    size_bytes = 4
    for elements in PASSES_ON_GPU if device.type == "cuda" else PASSES:
        x = torch.randn(elements // 128, 128, device=device, requires_grad=True)
        gradient = torch.randn_like(x)
        gain = torch.ones(128, device=device, requires_grad=True)

        def norm(x: Any = x, gain: Any = gain, gradient: Any = gradient) -> None:
            torch.autograd.grad(F.layer_norm(x, (128,), gain), (x, gain), gradient)

        def curve(x: Any = x, gradient: Any = gradient) -> None:
            torch.autograd.grad(F.gelu(x), (x,), gradient)

        def added(x: Any = x, gradient: Any = gradient) -> None:
            torch.add(x.detach(), gradient)

        # Read and written once forward, twice that backward (`dlojz.cost_model.workload.PASS_BACKWARD`).
        forward_bytes = 2 * size_bytes * elements
        yield Timed("pass", (3 * forward_bytes,), 1.0, f"norm {elements}"), norm
        yield Timed("pass", (3 * forward_bytes,), 1.0, f"gelu {elements}"), curve
        # Two read, one written, no backward.
        yield Timed("pass", (3 * size_bytes * elements,), 1.0, f"add {elements}"), added


def _launches(device: Any) -> Iterator[tuple[Timed, Callable[[], Any]]]:
    """Operations on next to nothing, with their backward, which the cost model counts as two."""
    import torch
    import torch.nn.functional as F

    x = torch.randn(2, 8, device=device, requires_grad=True)
    weight, gain = torch.randn(8, 8, device=device, requires_grad=True), torch.ones(8, device=device)

    def chain() -> None:
        y = x
        for _ in range(CHAIN // 4):
            y = y + F.gelu(F.linear(F.layer_norm(y, (8,), gain), weight))  # four operations: norm, linear, GELU, sum
        torch.autograd.grad(y, (x, weight), torch.ones_like(y))

    yield Timed("launch", (), 1 / (3 * CHAIN), "launch"), chain  # 3: backward counts as two launches each


def _updates(device: Any) -> Iterator[tuple[Timed, Callable[[], Any]]]:
    import torch

    for tensors, elements in UPDATES_ON_GPU if device.type == "cuda" else UPDATES:
        parameters = [torch.randn(elements, device=device, requires_grad=True) for _ in range(tensors)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer = torch.optim.AdamW(parameters)
        yield Timed("update", (tensors, elements), 1.0, f"{tensors}×{elements}"), optimizer.step


def _sharded(device: Any, ranks: int) -> Iterator[tuple[Timed, Callable[[], Any]]]:
    """The update of tensors that are split over the ranks: each operation first finds out where its parts lie."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh(device.type, (ranks,))
    for tensors, elements in UPDATES[:2]:
        parameters = []
        for _ in range(tensors):
            part = torch.randn(elements, device=device)
            parameter = DTensor.from_local(part, mesh, [Shard(0)]).requires_grad_()
            parameter.grad = DTensor.from_local(torch.randn_like(part), mesh, [Shard(0)])
            parameters.append(parameter)
        optimizer = torch.optim.AdamW(parameters)
        yield Timed("sharded", (tensors, elements), 1.0, f"{tensors}×{elements}"), optimizer.step


def _neighbours(device: Any, repeats: int) -> list[TimedMessage]:
    """Every even rank sends to the next one: until the last has received."""
    import torch
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    partner = rank ^ 1  # 0 ↔ 1, 2 ↔ 3, …
    points = []
    for message_bytes in MESSAGES:
        tensor = torch.zeros(message_bytes // 4, device=device)
        times_s = []
        for _ in range(repeats + 2):  # the first two are not counted
            dist.barrier()
            start_s = time.perf_counter()
            if partner < ranks:  # of an odd number of ranks the last has none
                # Who: even ranks to the next. What: zeros in fp32. How much: message_bytes.
                dist.recv(tensor, partner) if rank % 2 else dist.send(tensor, partner)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times_s.append(time.perf_counter() - start_s)
        slowest = torch.tensor(times_s[2:], device=device)  # (repeats,)
        # Who: all ranks. What: their times, of which the largest count. How much: 4 bytes each.
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        points.append(TimedMessage(message_bytes, statistics.median(slowest.tolist()), ranks, "p2p"))
    return points


ROWS, CHAIN_WIDTH, WIDER, LAYERS = 2048, 128, 4, 4
CHAIN_LENGTHS: Final = Timed("chain", (ROWS, CHAIN_WIDTH, LAYERS), 0.0, f"{LAYERS} × (norm, linear, GELU, linear)")
PARTS_LENGTHS: Final = Timed("parts", (ROWS, CHAIN_WIDTH, LAYERS), 0.0, "the chain's operations, each alone")


def chain() -> Callable[[], Any]:
    """Make a step of the chain: forward and backward, with new gradients."""
    import torch
    from torch import nn

    layers = [
        part
        for _ in range(LAYERS)
        for part in (
            nn.LayerNorm(CHAIN_WIDTH),
            nn.Linear(CHAIN_WIDTH, WIDER * CHAIN_WIDTH),
            nn.GELU(),
            nn.Linear(WIDER * CHAIN_WIDTH, CHAIN_WIDTH),
        )
    ]
    model, x = nn.Sequential(*layers), torch.randn(ROWS, CHAIN_WIDTH, requires_grad=True)

    def call() -> None:
        model(x).mean().backward()
        model.zero_grad(set_to_none=True)
        x.grad = None

    return call


def chain_parts() -> Callable[[], Any]:
    """Make the chain's operations, each on its own tensors: a product has two more in its backward."""
    import torch
    import torch.nn.functional as F

    wider = WIDER * CHAIN_WIDTH
    pairs = [(torch.randn(ROWS, k), torch.randn(k, n)) for k, n in ((CHAIN_WIDTH, wider), (wider, CHAIN_WIDTH))]
    gain = torch.ones(CHAIN_WIDTH, requires_grad=True)
    narrow_x, wide_x = (torch.randn(ROWS, width, requires_grad=True) for width in (CHAIN_WIDTH, wider))
    narrow_gradient, wide_gradient = torch.randn(ROWS, CHAIN_WIDTH), torch.randn(ROWS, wider)

    def call() -> None:
        for lhs, rhs in pairs:
            for _ in range(3 * LAYERS):  # forward and two gradients
                torch.mm(lhs, rhs)
        for _ in range(LAYERS):
            torch.autograd.grad(F.layer_norm(narrow_x, (CHAIN_WIDTH,), gain), (narrow_x, gain), narrow_gradient)
        for _ in range(LAYERS):
            torch.autograd.grad(F.gelu(wide_x), (wide_x,), wide_gradient)

    return call


def chained(timings: Sequence[Timed]) -> float | None:
    """Ratio of the measured chain to its parts, which took turns with it; None where they were not measured."""
    # One value each.
    chain_s, parts = ([timing.seconds for timing in timings if timing.what == kind] for kind in ("chain", "parts"))
    return chain_s[0] / parts[0] if chain_s and parts else None


ENGINES_WIDTH: Final = 8
TOYS: Final = ((2, 1), (8, 1), (8, 5))
"""Blocks, and linear layers with a norm in each: four tensors a layer."""
TENSORS_PER_LAYER: Final = 4
PAIRS: Final = (2, 8)
MEETING_ELEMENTS: Final = 2**14
MEETING_PRODUCTS: Final = 4
"""Of 512 × 128 × 512 each: some milliseconds on one core, what lies between two messages of a small model."""
LEAST_S: Final = 1e-7
"""What an engine is taken to cost where the difference of two measurements drowns."""
LEAST_CALLS: Final = 3
MEETING_S: Final = 0.005
"""About what products and message take together."""
LEAST_MEETINGS: Final = 41
LONG_PRODUCTS: Final = (64, 256)
"""Some 50 and 200 ms on one core: the forward and backward pass of small models."""
LONG_MEETINGS: Final = 11

Call = Callable[[], Any]


def measure_engines(*, windows: int, window_s: float, tell: Call | None = None) -> list[Timed]:
    """Measure the engines on this rank, together with all others of its process group; on CPUs.

    Args:
        windows: how often each is timed, at least 1; the median counts.
        window_s: seconds of each, about.
    """
    import torch

    timings = []
    if tell:
        tell()
    whole_s, parts_s = _by_turns((chain(), chain_parts()), window_s, torch.device("cpu"))
    timings += [CHAIN_LENGTHS._replace(seconds=whole_s), PARTS_LENGTHS._replace(seconds=parts_s)]
    for timed, bare, wrapped in _pairs():
        if tell:
            tell()
        # By turns, so that what else the machine does falls on both.
        window_pairs = [(_call_s(wrapped, window_s), _call_s(bare, window_s)) for _ in range(windows)]
        extra_s = statistics.median(wrapped_s - bare_s for wrapped_s, bare_s in window_pairs)
        timings.append(timed._replace(seconds=max(extra_s, LEAST_S)))
    if _ranks() > 1:
        if tell:
            tell()
        often = max(LEAST_MEETINGS, int(4 * windows * window_s / MEETING_S))  # as many as fill four times the windows
        timings.append(Timed("meeting", (), _meeting(often)[1], "meeting"))
        for products in LONG_PRODUCTS:
            if tell:
                tell()
            work_s, waited_s = _meeting(LONG_MEETINGS, products=products)
            timings.append(Timed("straggler", (round(1e6 * work_s),), waited_s, "meeting after longer work"))
    if _in_pairs(_ranks()):
        if tell:
            tell()
        timings.append(Timed("meeting", (2,), _meeting(often, _own_pair())[1], "meeting of pairs"))
    return timings


def _in_pairs(ranks: int) -> bool:
    return ranks > 2 and ranks % 2 == 0


def _own_pair() -> Any:
    """The process group of this rank and its neighbour; every rank makes all of them, as torch asks."""
    import torch.distributed as dist

    ranks = _ranks()
    groups = [dist.new_group([first_rank, first_rank + 1]) for first_rank in range(0, ranks, 2)]
    return groups[dist.get_rank() // 2]


def count_engines(ranks: int) -> int:
    """Count the measurements of `measure_engines` with so many ranks."""
    # Chain; kinds × toys, pairs of layers, a meeting, those after longer work, and that of pairs.
    meetings = 1 + len(LONG_PRODUCTS) + _in_pairs(ranks)
    return 1 + (len(TOYS) if ranks == 1 else 4 * len(TOYS) + len(PAIRS) + meetings)


def _call_s(call: Call, window_s: float) -> float:
    """Seconds of one call on the slowest rank, in a window that all ranks begin together; the same calls on all."""
    import torch
    import torch.distributed as dist

    several = _ranks() > 1

    def slowest(seconds: float) -> float:
        if not several:
            return seconds
        maximum = torch.tensor(seconds, dtype=torch.float64)
        # Who: all ranks. What: their seconds, of which the largest count. How much: 8 bytes.
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX)
        return float(maximum)

    call()
    start_s = time.perf_counter()
    call()
    # The slowest rank decides, so that all make the same number of calls: each call may hold a collective.
    calls = max(LEAST_CALLS, int(window_s / slowest(time.perf_counter() - start_s)))
    if several:
        # Who: all ranks. What: nothing but that each is there. How much: a few bytes.
        dist.barrier()
    start_s = time.perf_counter()
    for _ in range(calls):
        call()
    return slowest((time.perf_counter() - start_s) / calls)


def _toy(blocks: int, layers: int) -> Any:
    """Blocks of linear layers, each with a norm."""
    from torch import nn

    def block() -> Any:
        parts = [(nn.Linear(ENGINES_WIDTH, ENGINES_WIDTH), nn.LayerNorm(ENGINES_WIDTH)) for _ in range(layers)]
        return nn.Sequential(*(part for pair in parts for part in pair))

    return nn.Sequential(*(block() for _ in range(blocks)))


def _pairs() -> Iterator[tuple[Timed, Call, Call]]:
    """What is timed, the bare call, and the call with the engine."""
    import torch

    x = torch.randn(4, ENGINES_WIDTH, requires_grad=True)

    def step(model: Any) -> Call:
        return lambda: model(x).sum().backward()

    ranks = _ranks()
    for blocks, layers in TOYS:
        size = (blocks, blocks * layers * TENSORS_PER_LAYER)
        model = _toy(blocks, layers)
        bare, two_forwards = step(model), _forward_twice(model, x)
        for kind, wrapped in _wrapped(blocks, layers, ranks):
            label = f"{kind} {size[0]} × {size[1] // blocks}"
            # Against two forwards, so that what recomputing itself takes cancels.
            yield Timed(kind, size, 0.0, label), two_forwards if kind == "checkpoint" else bare, step(wrapped)
    if ranks == 1:
        return
    for pairs in PAIRS:
        messages = 2 * pairs
        yield Timed("dtensor", (messages,), 0.0, f"dtensor {messages}"), step(_layers(pairs)), step(_split(pairs))


def _forward_twice(model: Any, x: Any) -> Call:
    """A step with a second forward: what recomputing computes, without what keeps its books."""

    def call() -> None:
        model(x)
        model(x).sum().backward()

    return call


def _wrapped(blocks: int, layers: int, ranks: int) -> Iterator[tuple[str, Any]]:
    yield "checkpoint", _Checkpointed(_toy(blocks, layers))
    if ranks == 1:
        return
    import warnings

    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
        yield "ddp", DistributedDataParallel(_toy(blocks, layers), broadcast_buffers=False)
    mesh = init_device_mesh("cpu", (ranks,))
    for kind, reshard in (("fsdp2", False), ("fsdp3", True)):
        model = _toy(blocks, layers)
        for block in model:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        yield kind, fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


class _Checkpointed:
    """Blocks of which each is computed again in backward."""

    def __init__(self, blocks: Any) -> None:
        self.blocks = blocks

    def __call__(self, x: Any) -> Any:
        from torch.utils.checkpoint import checkpoint

        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def _layers(pairs: int) -> Any:
    from torch import nn

    def linear() -> Any:
        return nn.Linear(ENGINES_WIDTH, ENGINES_WIDTH)

    return nn.Sequential(*(nn.Sequential(linear(), linear()) for _ in range(pairs)))


def _split(pairs: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (_ranks(),))
    model = _layers(pairs)
    for pair in model:
        parallelize_module(pair, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return model


def _meeting(often: int, group: Any = None, *, products: int = MEETING_PRODUCTS) -> tuple[float, float]:
    """Median seconds of products, and of a message after them, mean of the ranks: the first wait for the last.

    Args:
        often: how many times both are done.
        group: whose ranks send to each other, while those of all other groups do the same; None: all ranks.
        products: before each message.
    """
    import torch
    import torch.distributed as dist

    lhs, rhs = torch.randn(512, 512), torch.randn(512, 128)
    message = torch.zeros(MEETING_ELEMENTS)
    taken_s = []
    for _ in range(often):
        begun_s = time.perf_counter()
        for _ in range(products):
            torch.mm(lhs, rhs)
        done_s = time.perf_counter()
        # Who: the group's ranks. What: zeros in fp32. How much: 64 KiB.
        dist.all_reduce(message, group=group)
        taken_s.append((done_s - begun_s, time.perf_counter() - done_s))
    seconds = torch.tensor(taken_s, dtype=torch.float64)
    # Who: all ranks. What: how long each computed and waited every time, of which the means count. How much: 16 bytes
    # each.
    dist.all_reduce(seconds)
    work_s, waited_s = (seconds / dist.get_world_size()).median(dim=0).values.tolist()
    return work_s, waited_s
