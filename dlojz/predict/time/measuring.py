"""One minute of measurements on the ranks that are here: products, convolutions, passes, launches, updates, messages,
and what the engines cost (`measuring_engines`).

Layer 3. Invariant: every rank makes the same calls in the same order, and all of them are busy while one is timed, so
that ranks which share cores, or the memory's bandwidth, are measured sharing them.

What is short is called over and over for a window of time, and counts by the mean of the window: a single call of a
rank that takes turns with others on a core would mostly fall between two turns. The median of the windows counts.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from dlojz.collectives.measuring import Point, measure
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
HALF: Final = ((512, 512, 512), (2048, 128, 128))
"""Products that are timed in bf16 too; on a GPU all of them are."""
UPDATES: Final = ((8, 256), (64, 256), (8, 65536), (64, 16384))
"""Tensors and elements of each."""
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
            which each rank holds a part (DTensor), or a kind of `dlojz.predict.time.measuring_engines`.
        size: of a product m, n, k, times; of a convolution the product that it comes to, and groups; of a pass bytes;
            of an update tensors and elements of each; of a launch nothing; of an engine its blocks and tensors.
        seconds: of one; of a convolution, a third of forward and backward; of an engine what it adds.
        label: as a figure shows it.
        precision: of a product.
    """

    what: str
    size: tuple[int, ...]
    seconds: float
    label: str
    precision: Precision = "fp32"


def measure_rank(
    *, windows: int = WINDOWS, window_s: float = WINDOW_S, tell: Callable[[int, int], None] | None = None
) -> tuple[list[Timed], list[Point]]:
    """Measure on this rank, together with all others of its process group.

    Args:
        windows: how often each computation is timed, at least 1.
        window_s: seconds of each.
        tell: called before each measurement, with how many are done and how many there are.

    Returns:
        What this rank measured of computation, and the messages' points, the same on every rank.
    """
    import torch
    import torch.distributed as dist

    from dlojz.predict.time.measuring_engines import count_engines, measure_engines

    ranks = dist.get_world_size() if dist.is_initialized() else 1
    device = torch.device("cuda", torch.cuda.current_device()) if _on_gpu() else torch.device("cpu")
    work = list(_computations(device, ranks))
    engines = 0 if device.type == "cuda" else count_engines(ranks)  # a GPU's host runs ahead of it
    total = len(work) + engines + (len(COLLECTIVES) + 1 if ranks > 1 else 0)
    found = []
    for number, (timed, call) in enumerate(work):
        if tell:
            tell(number, total)
        seconds = statistics.median(_window_s(call, window_s, device) for _ in range(windows))
        found.append(timed._replace(seconds=seconds * timed.seconds))
    if engines:
        done = itertools.count(len(work))
        found += measure_engines(
            windows=windows, window_s=window_s, tell=(lambda: tell(next(done), total)) if tell else None
        )
    points: list[Point] = []
    if ranks > 1:
        for number, collective in enumerate(COLLECTIVES):
            if tell:
                tell(len(work) + engines + number, total)
            points += measure(collective, MESSAGES, repeats=max(LEAST_REPEATS, 5 * windows), warmup=2)
        points += _neighbours(device, max(LEAST_REPEATS, 5 * windows))
    if tell:
        tell(total, total)
    return found, points


def _on_gpu() -> bool:
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        return "nccl" in str(dist.get_backend())
    return torch.cuda.is_available()


def _window_s(call: Callable[[], Any], window_s: float, device: Any) -> float:
    """Mean seconds of one call during a window that all ranks begin together; on a GPU by its own clock."""
    import torch.distributed as dist

    call()
    if dist.is_initialized() and dist.get_world_size() > 1:
        # Who: all ranks. What: nothing but that each is there. How much: a few bytes.
        dist.barrier()
    if device.type == "cuda":
        return _window_on_gpu_s(call, window_s)
    count, start_s = 0, time.perf_counter()
    while (took_s := time.perf_counter() - start_s) < window_s:
        call()
        count += 1
    return took_s / count


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
        if took_s >= window_s / 2:
            return float(took_s) / count
        count *= 4


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

    def times(call: Callable[[Any, Any], Any], left: Any, right: Any) -> Callable[[], Any]:
        return lambda: call(left, right)

    on_gpu = device.type == "cuda"
    sizes = PRODUCTS_ON_GPU if on_gpu else PRODUCTS
    asked: list[tuple[Precision, Any]] = [("fp32", sizes), ("bf16", sizes if on_gpu else HALF)]
    for precision, some in asked:
        kind = torch.bfloat16 if precision == "bf16" else torch.float32
        for m, n, k in some:
            left, right = torch.randn(m, k, device=device, dtype=kind), torch.randn(k, n, device=device, dtype=kind)
            yield Timed("product", (m, n, k, 1), 1.0, f"{m}×{n}×{k}", precision), times(torch.mm, left, right)
    for m, n, k, heads in ATTENTION:
        left, right = torch.randn(heads, m, k, device=device), torch.randn(heads, k, n, device=device)
        yield Timed("attention", (m, n, k, heads), 1.0, f"{heads}×({m}×{n}×{k})"), times(torch.bmm, left, right)


def _convolutions(device: Any) -> Iterator[tuple[Timed, Callable[[], Any]]]:
    import torch
    import torch.nn.functional as F

    for inside, outside, side, kernel in CONVOLUTIONS:
        x = torch.randn(IMAGES, inside, side, side, device=device, requires_grad=True)
        weight = torch.randn(outside, inside, kernel, kernel, device=device, requires_grad=True)
        gradient = torch.randn(IMAGES, outside, side, side, device=device)

        def call(x: Any = x, weight: Any = weight, gradient: Any = gradient, padding: int = kernel // 2) -> None:
            torch.autograd.grad(F.conv2d(x, weight, padding=padding), (x, weight), gradient)

        size = (IMAGES * side * side, outside, inside * kernel * kernel, 1)
        yield Timed("convolution", size, 1 / 3, f"{inside}→{outside} {side}² {kernel}×{kernel}"), call


def _passes(device: Any) -> Iterator[tuple[Timed, Callable[[], Any]]]:
    """Forward and backward of what stands between the products; bytes as the cost model counts them, in fp32."""
    import torch
    import torch.nn.functional as F

    size_bytes = 4
    for elements in PASSES:
        x = torch.randn(elements // 128, 128, device=device, requires_grad=True)
        gradient = torch.randn_like(x)
        gain = torch.ones(128, device=device, requires_grad=True)

        def norm(x: Any = x, gain: Any = gain, gradient: Any = gradient) -> None:
            torch.autograd.grad(F.layer_norm(x, (128,), gain), (x, gain), gradient)

        def curve(x: Any = x, gradient: Any = gradient) -> None:
            torch.autograd.grad(F.gelu(x), (x,), gradient)

        def added(x: Any = x, gradient: Any = gradient) -> None:
            torch.add(x.detach(), gradient)

        # Read and written once forward, twice that backward (`dlojz.predict.time.catalogue.PASS_BACKWARD`).
        moved = 2 * size_bytes * elements
        yield Timed("pass", (3 * moved,), 1.0, f"norm {elements}"), norm
        yield Timed("pass", (3 * moved,), 1.0, f"gelu {elements}"), curve
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
            y = y + F.gelu(F.linear(F.layer_norm(y, (8,), gain), weight))
        torch.autograd.grad(y, (x, weight), torch.ones_like(y))

    yield Timed("launch", (), 1 / (3 * CHAIN), "launch"), chain


def _updates(device: Any) -> Iterator[tuple[Timed, Callable[[], Any]]]:
    import torch

    for tensors, elements in UPDATES:
        held = [torch.randn(elements, device=device, requires_grad=True) for _ in range(tensors)]
        for one in held:
            one.grad = torch.randn_like(one)
        optimizer = torch.optim.AdamW(held)
        yield Timed("update", (tensors, elements), 1.0, f"{tensors}×{elements}"), optimizer.step


def _sharded(device: Any, ranks: int) -> Iterator[tuple[Timed, Callable[[], Any]]]:
    """The update of tensors that are split over the ranks: each operation first finds out where its parts lie."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh(device.type, (ranks,))
    for tensors, elements in UPDATES[:2]:
        held = []
        for _ in range(tensors):
            part = torch.randn(elements, device=device)
            one = DTensor.from_local(part, mesh, [Shard(0)]).requires_grad_()
            one.grad = DTensor.from_local(torch.randn_like(part), mesh, [Shard(0)])
            held.append(one)
        optimizer = torch.optim.AdamW(held)
        yield Timed("sharded", (tensors, elements), 1.0, f"{tensors}×{elements}"), optimizer.step


def _neighbours(device: Any, repeats: int) -> list[Point]:
    """Every even rank sends to the next one: until the last has received."""
    import torch
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    partner = rank ^ 1
    points = []
    for message_bytes in MESSAGES:
        tensor = torch.zeros(message_bytes // 4, device=device)
        times_s = []
        for _ in range(repeats + 2):
            dist.barrier()
            start_s = time.perf_counter()
            if partner < ranks:
                # Who: even ranks to the next. What: zeros in fp32. How much: message_bytes.
                dist.recv(tensor, partner) if rank % 2 else dist.send(tensor, partner)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times_s.append(time.perf_counter() - start_s)
        slowest = torch.tensor(times_s[2:], device=device)
        # Who: all ranks. What: their times, of which the largest count. How much: 4 bytes each.
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        points.append(Point(message_bytes, statistics.median(slowest.tolist()), ranks, "p2p"))
    return points
