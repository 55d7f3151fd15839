"""Calibration: how much of its peaks a generation of GPUs reaches with its software, in a dozen bounded parameters.

A profile says on which rows it was fitted; errors are reported on the other half. Nothing here is specific to one
model, table or cluster. Where a GPU's own file has measured figures (products by size, passes, launches), these stand
before the profile's.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from dlojz.base.errors import LabError
from dlojz.base.language import one_of, refusal, say
from dlojz.hardware import Device, Precision
from dlojz.hardware.gpus import MEASURED

FOLDER: Final = Path(__file__).with_name("data") / "calibrations"


class Bound(NamedTuple):
    """A parameter's physical range, and what it is.

    Attributes:
        low, high: the least and the greatest value that can be true.
        unit: empty for a share.
        meaning: in one phrase.
    """

    low: float
    high: float
    unit: str
    meaning: str

    def clip(self, value: float) -> float:
        """The nearest value within the range."""
        return min(max(value, self.low), self.high)


BOUNDS: Final[dict[str, Bound]] = {
    "product_efficiency": Bound(0.4, 0.98, "", "of the dense peak, large aligned product with full waves"),
    "attention_efficiency": Bound(0.05, 0.95, "", "of the dense peak, products of attention"),
    "memory_efficiency": Bound(0.4, 0.95, "", "of the memory's bandwidth, passes over large tensors"),
    "unaligned": Bound(0.02, 1.0, "", "speed of a product whose sizes are not multiples of 16 bytes"),
    "product_start": Bound(0.0, 1024.0, "elements", "inner size at which a product reaches half its speed"),
    "intra_efficiency": Bound(0.3, 1.1, "", "of the measured bandwidth within a node, while computing"),
    "inter_efficiency": Bound(0.1, 1.0, "", "of the measured bandwidth between nodes, while computing"),
    "launch_s": Bound(1e-6, 60e-6, "s", "the host needs for one kernel with what is around it in Python"),
    "serial_s": Bound(0.0, 100e-6, "s", "a kernel and its host lose where launches wait (CUDA_LAUNCH_BLOCKING=1)"),
    "micro_batch_s": Bound(0.0, 0.005, "s", "a pipeline stage loses per micro-batch and direction to synchronisation"),
    "step_s": Bound(0.0, 5.0, "s", "once per step: data, norms, loss scale, logging"),
    "overlap": Bound(0.0, 0.95, "", "of communication with computation: 0 none, towards 1 all of the shorter"),
}
"""At most twelve."""


@dataclass(frozen=True)
class Calibration:
    """Efficiencies and overheads of one generation of GPUs with its software.

    Attributes:
        name: of the profile, e.g. `a100`.
        product_efficiency, attention_efficiency, memory_efficiency, unaligned, product_start, intra_efficiency,
        inter_efficiency, launch_s, serial_s, micro_batch_s, step_s, overlap: as `BOUNDS` says.

    Raises:
        LabError: if a parameter is out of its bounds.
    """

    name: str
    product_efficiency: float = 0.87
    attention_efficiency: float = 0.5
    memory_efficiency: float = 0.8
    unaligned: float = 0.3
    product_start: float = 32.0
    intra_efficiency: float = 0.9
    inter_efficiency: float = 0.8
    launch_s: float = 35e-6
    serial_s: float = 30e-6
    micro_batch_s: float = 1e-3
    step_s: float = 0.1
    overlap: float = 0.5

    def __post_init__(self) -> None:
        for name, bound in BOUNDS.items():
            value = getattr(self, name)
            # Also of a profile's file: a value beyond what is physical is refused, not clipped.
            if not (isinstance(value, int | float) and bound.low <= value <= bound.high):
                raise refusal(
                    en=f"{name} is {bound.meaning}, between {bound.low:g} and {bound.high:g} {bound.unit}".rstrip()
                    + f", but {value!r} was received.",
                    fr=f"{name} doit être compris entre {bound.low:g} et {bound.high:g} {bound.unit}".rstrip()
                    + f", mais {value!r} a été reçu.",
                )

    @property
    def values(self) -> dict[str, float]:
        """The parameters by name, in the order of `BOUNDS`."""
        return {name: getattr(self, name) for name in BOUNDS}


@dataclass(frozen=True)
class Profile:
    """Calibration with its provenance, as its file keeps it.

    Attributes:
        calibration: the parameters.
        fitted_on: names of the rows it was fitted on.
        held_out: names of the rows of the same tables that were kept for reporting.
        source, date: what made it, when.
        fixed: parameters that these rows do not tell, taken from elsewhere, with the reason.
    """

    calibration: Calibration
    fitted_on: tuple[str, ...]
    held_out: tuple[str, ...]
    source: str
    date: str
    fixed: Mapping[str, str]


TYPICAL: Final = "typical"
"""Name of the calibration of a GPU whose generation has no profile."""


@cache
def typical() -> Calibration:
    """Make the calibration of a GPU that nobody measured: of each parameter the median of the shipped profiles."""
    shipped = [calibration(file.stem) for file in sorted(FOLDER.glob("*.json"))]
    return Calibration(
        TYPICAL,
        **{name: statistics.median(getattr(profile_values, name) for profile_values in shipped) for name in BOUNDS},
    )


PROFILE_OF_GPU: Final = {"v100": "v100", "a100": "a100", "h100": "h100", "h200": "h100"}
"""The calibration of each generation; H200 has the processor of H100 with more memory."""


def of_gpu(gpu: Device) -> Calibration:
    """Look up the calibration of a GPU, which its generation names; the median of all where there is none."""
    profile_name = PROFILE_OF_GPU.get(gpu.generation)
    return typical() if profile_name is None else calibration(profile_name)


@lru_cache(maxsize=256)
def on_gpu(parameters: Calibration, gpu: Device) -> Calibration:
    """Put what the GPU's own file has measured of passes and launches before the profile's; products: `measured_reach`.

    Raises:
        LabError: if a figure is beyond what is physical.
    """
    figures: dict[str, Any] = {}
    if gpu.pass_bytes_per_s is not None:
        figures["memory_efficiency"] = gpu.pass_bytes_per_s / gpu.memory_bytes_per_s
    if gpu.launch_s is not None:
        figures["launch_s"] = gpu.launch_s
    return replace(parameters, **figures) if figures else parameters


def class_defaults(parameters: Calibration, gpu: Device, precision: Precision, kernel: str | None) -> tuple[str, ...]:
    """Name the figures of a GPU for which its class's stand in, as its file would call them; none for a known one.

    Args:
        kernel: of fused attention; None where attention is not fused.
    """
    is_typical = parameters.name == TYPICAL
    names = [key for key in gpu.left_out if is_typical or key not in MEASURED]
    if is_typical and ("bf16" if precision == "fp16" else precision) not in gpu.product_flops:
        names.insert(0, f"products.{precision}")
    passes = ("forward", "backward") if kernel else ()
    if any(None in gpu.attention_rates(f"{kernel}_{direction}") for direction in passes):
        names.append(f"attention.{kernel}")
    return tuple(names)


def default_words(names: Sequence[str], gpu: Device) -> str:
    """Say loudly that a class's figures stand in for measured ones; empty where none do."""
    if not names:
        return ""
    listed = ", ".join(names)
    return say(
        en=f"{listed} of {gpu.title} were not measured: class defaults stand in, and seconds may be a third off; run "
        "`dlojz calibrate` on this GPU, or describe it (docs/instructors.md)",
        fr=f"{listed} de {gpu.title} ne sont pas mesurés : des valeurs par défaut les remplacent, les secondes peuvent "
        "se tromper d’un tiers ; lancez `dlojz calibrate` sur ce GPU, ou décrivez-le (docs/instructors.md)",
    )


def calibration(name: str) -> Calibration:
    """Read the parameters of a shipped profile (`v100`, `a100`, `h100`), or of a file.

    Raises:
        LabError: if there is none of this name, or the file is not legal.
    """
    return profile(name).calibration


@cache
def profile(name: str) -> Profile:
    """Read a shipped profile, or one from a file, with its provenance.

    Raises:
        LabError: if there is none of this name, or the file is not legal.
    """
    # A bare name is a shipped profile, anything with a folder or `.json` a file.
    path = FOLDER / f"{name}.json" if "/" not in name and not name.endswith(".json") else Path(name)
    names = sorted(file.stem for file in FOLDER.glob("*.json"))
    if not path.is_file():
        raise LabError(one_of("calibration", name, names))
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        values = {key: float(value) for key, value in raw["parameters"].items()}
        legal = {field.name for field in fields(Calibration)}
        for key in values:
            if key not in legal:
                raise LabError(one_of("parameter", key, BOUNDS))
        return Profile(
            Calibration(name=str(raw["name"]), **values),
            tuple(raw["fitted_on"]),
            tuple(raw["held_out"]),
            str(raw["source"]),
            str(raw["date"]),
            dict(raw.get("fixed", {})),
        )
    except LabError:  # a ValueError too, which the next clause would reword
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise refusal(
            en=f"{path.name} is no calibration ({error!r}): it needs name, parameters, fitted_on, held_out, source "
            "and date.",
            fr=f"{path.name} n’est pas un calibrage ({error!r}) : il lui faut name, parameters, fitted_on, "
            "held_out, source et date.",
        ) from None


TILES: Final = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.8), (64, 64, 0.65))
"""Rows and columns of the tiles of a product's result, and how far from the peak each one stays at best.

Source: the tiles of cuBLAS that NVIDIA names (Deep Learning Performance, "Matrix Multiplication Background", §3.1); the
larger one reuses more of what it reads. The last column is ours: bytes read per operation of a tile against 256 × 128.
"""
ALIGNED: Final = 8
"""16-bit elements in 16 bytes: a product whose inner or outer size is not a multiple of it misses the fast kernels.

Source: NVIDIA, same document, §2.2 ("Tensor Core Requirements").
"""


class Product(NamedTuple):
    """A product of matrices, `batch` times.

    Attributes:
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
        """Floating-point operations, two per multiply-add."""
        return 2.0 * self.batch * self.m * self.n * self.k * self.work

    @property
    def moved_bytes(self) -> float:
        """Bytes read and written in 16 bit, each matrix once."""
        return 2.0 * self.batch * (self.m * self.k + self.k * self.n + self.m * self.n)

    def backward(self) -> tuple[Product, Product]:
        """The products for the gradients of both factors: [m, n] by [n, k], and [k, m] by [m, n]."""
        m, n, k = self.m, self.n, self.k
        return self._replace(m=m, n=k, k=n), self._replace(m=k, n=n, k=m)


@lru_cache(maxsize=65536)
def wave_efficiency(product: Product, num_sms: int) -> float:
    """Share of the multiprocessors' time that a product's result uses, for its best tile.

    Results at the edge of a tile, and multiprocessors idle in the last wave, are computed or waited for in vain:
    m·n·batch / (waves · multiprocessors · tile), waves = ⌈⌈m/tile rows⌉·⌈n/tile columns⌉·batch / multiprocessors⌉.

    Source: NVIDIA, Deep Learning Performance, "Matrix Multiplication Background", §3.1 and §3.2 (tile and wave
    quantization).

    Args:
        num_sms: multiprocessors of the GPU, at least 1.
    """
    best = 0.0
    for rows, columns, reach in TILES:
        tiles = math.ceil(product.m / rows) * math.ceil(product.n / columns) * product.batch
        waves = math.ceil(tiles / num_sms)
        # Useful elements over those that the waves could compute.
        best = max(best, reach * product.m * product.n * product.batch / (waves * num_sms * rows * columns))
    return best


def shape_efficiency(product: Product, gpu: Device, calibration: Calibration, start: float | None = None) -> float:
    """Share of its best that a product's sizes leave it: of waves, of alignment, of a tile's beginning and end.

    Args:
        start: inner size at which half of the speed is reached; by default the calibration's.
    """
    efficiency = wave_efficiency(product, gpu.num_sms)
    if product.n % ALIGNED or product.k % ALIGNED:  # rows of the three matrices are k and n long
        efficiency *= calibration.unaligned
    # Prologue and epilogue of a tile: half speed at k = start.
    return efficiency * product.k / (product.k + (calibration.product_start if start is None else start))


NEAREST: Final = 3
"""Measured sizes that the figure of another one is taken from, by their distance in logarithms."""
LEAST_LEFT: Final = 0.1
"""Of a measured product's seconds, what is left at least once the kernel's own time is taken off."""


def nearest_mean(size: Sequence[int], figures: Mapping[tuple[int, ...], float]) -> float:
    """Geometric mean of the figures of the nearest sizes, weighted by 1/distance²; that of the size where it is known.

    Source: Shepard 1968, "A two-dimensional interpolation function for irregularly-spaced data".
    """
    if tuple(size) in figures:
        return figures[tuple(size)]
    point = [math.log1p(length) for length in size]
    neighbours = sorted((math.dist(point, [math.log1p(length) for length in near]), near) for near in figures)[:NEAREST]
    weights = [distance**-2 for distance, _ in neighbours]
    logarithms = [math.log(figures[near]) for _, near in neighbours]
    return math.exp(sum(map(math.prod, zip(weights, logarithms, strict=True))) / sum(weights))


@lru_cache(maxsize=65536)
def measured_reach(product: Product, gpu: Device, calibration: Calibration, precision: Precision) -> float | None:
    """Share of the peak that the measured products of nearest size reach, beside their tiles; None without any.

    A product of measured size takes what was measured. What was measured in bf16 holds for fp16, and for fp8 as the
    share of its peak.
    """
    measured_in = precision if precision in gpu.product_flops or precision in ("fp32", "tf32") else "bf16"
    shares = _shares(gpu, calibration, measured_in)
    return nearest_mean(product[:3], shares) if shares else None


@lru_cache(maxsize=64)
def _shares(gpu: Device, calibration: Calibration, precision: Precision) -> dict[tuple[int, ...], float]:
    shares: dict[tuple[int, ...], float] = {}
    for (m, n, k), rate in gpu.product_flops.get(precision, {}).items():
        product = Product(m, n, k)
        measured_s = product.flops / rate
        # The kernel's own time is counted by itself.
        computed_s = max(measured_s - gpu.kernel_s, LEAST_LEFT * measured_s)
        ideal_s = product.flops / (gpu.peak_flops[precision] * shape_efficiency(product, gpu, calibration))
        shares[m, n, k] = ideal_s / computed_s
    return shares
