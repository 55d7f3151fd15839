"""How long one operator of a layer takes on one GPU: a matrix product, or a pass over memory.

Layer 3. Invariant: times come from shapes and from the `Calibration`, never from the name of a model. A product is
computed in tiles, one per multiprocessor at a time, so that its time is a whole number of waves; what is not a product
takes the time to move its bytes.

Symbols: a product multiplies [m, k] by [k, n], `batch` times.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from dlojz.hardware import Gpu, Precision
from dlojz.predict.time.calibration import Calibration
from dlojz.predict.time.layouts import element_bytes

TILES: Final = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.8), (64, 64, 0.65))
"""Rows and columns of the tiles of a product's result, and how far from the peak each one stays at best.

Source: the tiles of cuBLAS that NVIDIA names (Deep Learning Performance, "Matrix Multiplication Background", §3.1); the
larger one reuses more of what it reads. The last column is ours: bytes read per operation of a tile against 256 × 128.
"""
ALIGNED: Final = 8
"""16-bit elements in 16 bytes: a product whose inner or outer size is not a multiple of it misses the fast kernels.

Source: NVIDIA, same document, §2.2 ("Tensor Core Requirements").
"""
CAST_BYTES: Final = 2
"""Per element of a factor in fp8: written as it is and transposed; it is read by the operator before it, which casts.

Source: NVIDIA Transformer Engine, "Using FP8": fused casts of norms and activations, and the transposed copy on Hopper.
"""


class Product(NamedTuple):
    """A product of matrices, `batch` times.

    Attributes:
        m, n, k: sizes.
        batch: how often; above 1 for the heads of an attention.
        attention: whether it is one of the two products of unfused attention, whose kernels are less well tuned.
        work: share of the operations that are really done (½ where a causal mask is used to skip).
    """

    m: int
    n: int
    k: int
    batch: int = 1
    attention: bool = False
    work: float = 1.0

    @property
    def flops(self) -> float:
        """Two per multiply-add."""
        return 2.0 * self.batch * self.m * self.n * self.k * self.work

    @property
    def moved_bytes(self) -> float:
        """Bytes read and written in 16 bit, each matrix once."""
        return 2.0 * self.batch * (self.m * self.k + self.k * self.n + self.m * self.n)

    def backward(self) -> tuple[Product, Product]:
        """The products for the gradients of both factors: [m, n] by [n, k], and [k, m] by [m, n]."""
        m, n, k = self.m, self.n, self.k
        return self._replace(m=m, n=k, k=n), self._replace(m=k, n=n, k=m)


@dataclass(frozen=True)
class Operator:
    """What a layer does between two synchronisations, forward and backward apart.

    Attributes:
        name: as a table shows it.
        forward, backward: products.
        forward_bytes, backward_bytes: moved to and from memory beside the products.
        kernels: launched forward; backward about twice as many.
        core: part of attention's core, which selective recomputation runs again.
    """

    name: str
    forward: tuple[Product, ...] = ()
    backward: tuple[Product, ...] = ()
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    kernels: int = 1
    core: bool = False


def product_operator(name: str, product: Product, *, kernels: int = 1, core: bool = False) -> Operator:
    """An operator that is one product, with the two of its backward."""
    return Operator(name, (product,), product.backward(), kernels=kernels, core=core)


@lru_cache(maxsize=65536)
def wave_efficiency(product: Product, num_sms: int) -> float:
    """Share of the multiprocessors' time that a product's result uses, for its best tile.

    Results at the edge of a tile, and multiprocessors idle in the last wave, are computed or waited for in vain:
    m·n·batch / (waves · multiprocessors · tile), waves = ⌈⌈m/tile rows⌉·⌈n/tile columns⌉·batch / multiprocessors⌉.

    Source: NVIDIA, Deep Learning Performance, "Matrix Multiplication Background", §3.1 and §3.2 (tile and wave
    quantization).

    Args:
        product: of what sizes.
        num_sms: multiprocessors of the GPU, at least 1.
    """
    best = 0.0
    for rows, columns, reach in TILES:
        tiles = math.ceil(product.m / rows) * math.ceil(product.n / columns) * product.batch
        waves = math.ceil(tiles / num_sms)
        best = max(best, reach * product.m * product.n * product.batch / (waves * num_sms * rows * columns))
    return best


def alignment_efficiency(product: Product, calibration: Calibration) -> float:
    """Loss of a product whose sizes are not multiples of what tensor cores read at once."""
    if product.n % ALIGNED or product.k % ALIGNED:  # rows of the three matrices are k and n long
        return calibration.unaligned
    return 1.0


def product_s(product: Product, gpu: Gpu, calibration: Calibration, precision: Precision) -> float:
    """Seconds of a product: the slower of computing and of moving its matrices once (roofline).

    With fp8 the products of attention stay in bf16 (Transformer Engine's default).

    Source: Williams, Waterman, Patterson 2009, "Roofline" (CACM 52), with the peak multiplied by the efficiencies.
    """
    reach = calibration.attention_efficiency if product.attention else calibration.product_efficiency
    efficiency = reach * wave_efficiency(product, gpu.num_sms) * alignment_efficiency(product, calibration)
    efficiency *= product.k / (product.k + calibration.product_start)
    peak = gpu.peak_flops["bf16" if product.attention and precision == "fp8" else precision]
    memory = gpu.memory_bytes_per_s * calibration.memory_efficiency
    cast = CAST_BYTES * (product.m + product.n) * product.k if precision == "fp8" and not product.attention else 0.0
    moved = product.moved_bytes * element_bytes(precision) / 2
    return max(product.flops / (peak * efficiency), moved / memory) + cast / memory


def operators_s(
    operators: Iterable[Operator],
    gpu: Gpu,
    calibration: Calibration,
    precision: Precision,
    *,
    blocking: bool = False,
) -> tuple[float, float]:
    """Seconds of operators, forward and backward, each at least as long as the host takes to launch its kernels.

    Args:
        blocking: whether the host waits for each kernel before it launches the next (`CUDA_LAUNCH_BLOCKING=1`).
    """
    forward = backward = 0.0
    # Passes are counted in 16 bit.
    memory = gpu.memory_bytes_per_s * calibration.memory_efficiency * 2 / element_bytes(precision)
    kernels = 0
    for one in operators:
        forward += sum(product_s(each, gpu, calibration, precision) for each in one.forward)
        backward += sum(product_s(each, gpu, calibration, precision) for each in one.backward)
        forward += one.forward_bytes / memory
        backward += one.backward_bytes / memory
        kernels += one.kernels
    if blocking:
        return forward + kernels * calibration.serial_s, backward + 2 * kernels * calibration.serial_s
    return max(forward, kernels * calibration.launch_s), max(backward, 2 * kernels * calibration.launch_s)
