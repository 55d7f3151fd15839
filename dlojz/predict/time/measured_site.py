"""From a machine's measurements to what the cost model takes: a cluster, a calibration, the cost of an update.

Layer 3. Invariant: each number of ranks has its own processor, because ranks that share cores are each slower; every
parameter comes from measurements of what it stands for, none from the time of a model, and `residuals` tells how far
each measurement lies from what the parameters say of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, cast, get_args

import numpy as np

from dlojz.hardware import Cluster, Gpu, Precision, cluster, gpu
from dlojz.hardware.links import Collective, Interconnect, bus_factor
from dlojz.predict.time.calibration import BOUNDS, Calibration
from dlojz.predict.time.local import from_measurements
from dlojz.predict.time.measured import Measured, Setup
from dlojz.predict.time.measuring import Timed
from dlojz.predict.time.measuring_chain import chained
from dlojz.predict.time.operators import Product, product_s
from dlojz.schema import LabError
from dlojz.text import say

BEST_SHARE: Final = 0.9
"""Of a CPU's peak, what its best product is taken to reach: only the product of both counts."""
MEMORY_SHARE: Final = 0.8
"""The same of the memory and the median pass."""
STARTS: Final = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""Inner sizes at half speed that are tried."""
LEAST_LEFT: Final = 0.1
"""Of a measured product, what is left at least once its launch is taken off."""


MOST_CHAINED: Final = 2.0
"""A chain that takes more than twice its parts, or less than half, was disturbed."""
ENGINES: Final = ("checkpoint", "ddp", "fsdp2", "fsdp3", "dtensor")


class Line(NamedTuple):
    """Seconds of something from two numbers: start · a + slope · b.

    Attributes:
        start: seconds per message, per tensor, or per block.
        slope: seconds per byte, per element, or per tensor.
    """

    start: float
    slope: float


class Residual(NamedTuple):
    """A measurement beside what the parameters say of it.

    Attributes:
        what, label: of the measurement.
        size: operations of a product, bytes of a pass or message, elements of an update.
        measured_s, fitted_s: seconds.
    """

    what: str
    label: str
    size: float
    measured_s: float
    fitted_s: float

    @property
    def error(self) -> float:
        """Relative: 0.1 means that the parameters say 10 % more than was measured."""
        return self.fitted_s / self.measured_s - 1


@dataclass(frozen=True)
class Site:
    """A machine as the cost model takes it, for one number of ranks.

    Attributes:
        ranks: that share it.
        cluster: its processor and links.
        calibration: how far of the peaks it stays.
        update: seconds of AdamW per tensor and per element.
        sharded: the same of tensors split over the ranks.
        engines: seconds that each kind of `measuring_engines` adds per block and per tensor, `dtensor` per message.
        meeting_s: of an all-reduce between two computations.
        chained: times that a chain of operations takes as long as its parts say; 1 where none was measured.
        residuals: of every measurement.
    """

    ranks: int
    cluster: Cluster
    calibration: Calibration
    update: Line
    sharded: Line
    engines: Mapping[str, Line]
    meeting_s: float
    chained: float
    residuals: tuple[Residual, ...]

    def engine_s(self, kind: str, blocks: float, tensors: float = 0.0) -> float:
        """Seconds that an engine adds to so many blocks with so many tensors; 0 where it was not measured."""
        taken = self.engines.get(kind, Line(0.0, 0.0))
        return blocks * taken.start + tensors * taken.slope

    @property
    def median_error(self) -> float:
        """Median of the residuals' absolute values."""
        return statistics.median(abs(one.error) for one in self.residuals)


def line(rows: Sequence[tuple[float, float, float]]) -> Line:
    """Start and slope by least squares of relative errors, both at least 0.

    Args:
        rows: (a, b, seconds) of each measurement; at least one.

    Source: as `dlojz.collectives.calibration` fits α and β (normal equations; Lawson & Hanson 1974, ch. 23).
    """
    table = np.array([(a / seconds, b / seconds) for a, b, seconds in rows])
    ones = np.ones(len(rows))
    start, slope = np.linalg.lstsq(table, ones, rcond=None)[0]
    squares = (table**2).sum(axis=0)
    if start < 0 or squares[0] == 0:
        return Line(0.0, float(table[:, 1].sum() / squares[1]))
    if slope < 0 or squares[1] == 0:
        return Line(float(table[:, 0].sum() / squares[0]), 0.0)
    return Line(float(start), float(slope))


def link_of(measured: Measured) -> Interconnect:
    """The link between this machine's ranks: α and bus bandwidth of each collective by number of ranks.

    A collective that was not measured is taken as slow as an all-reduce; one rank alone has no messages.
    """
    collectives = get_args(Collective)
    alpha: dict[str, dict[int, float]] = {name: {} for name in collectives}
    bandwidth: dict[str, dict[int, float]] = {name: {} for name in collectives}
    for setup in measured.setups:
        known = {point.collective for point in setup.points}
        for name in collectives if known else ():
            taken = name if name in known else "all_reduce"
            own = [point for point in setup.points if point.collective == taken]
            factor = bus_factor(cast(Collective, taken), setup.ranks)
            found = line([(1.0, factor * point.message_bytes, point.time_s) for point in own])
            alpha[name][setup.ranks] = found.start
            bandwidth[name][setup.ranks] = 1 / max(found.slope, 1e-15)
    if not alpha["all_reduce"]:
        return cluster("local").intra
    return Interconnect("measured", f"{measured.machine}, {measured.date}", alpha, bandwidth, {})


def site(measured: Measured, ranks: int = 1, *, image: bool = True, precision: Precision = "fp32") -> Site:
    """The machine while so many ranks share it.

    Args:
        measured: its measurements.
        ranks: processes of the run, at least 1.
        image: whether the model has convolutions, which then count among the products.
        precision: of the products.

    Raises:
        LabError: if so many ranks, or this precision, were not measured.
    """
    setup = measured.setup(ranks)
    launch_s = statistics.median(one.seconds for one in setup.timings if one.what == "launch")
    kinds = ("product", "attention", "convolution") if image else ("product", "attention")
    some = [one for one in setup.timings if one.what in kinds and one.precision == precision]
    if not any(one.what == "product" for one in some):
        raise LabError(
            say(
                en=f"products in {precision} were not measured on this machine: use fp32.",
                fr=f"les produits en {precision} n’ont pas été mesurés sur cette machine : prenez fp32.",
            )
        )
    products = [(_product(one), max(one.seconds - launch_s, LEAST_LEFT * one.seconds)) for one in some]
    passes = [(float(one.size[0]), one.seconds) for one in setup.timings if one.what == "pass"]
    chip = _chip(measured, products, passes, precision)
    found = _with_start(
        from_measurements("measured", chip, products=products, passes=passes, precision=precision), chip, products,
        precision,
    )  # fmt: skip
    within = BOUNDS["serial_s"]
    found = replace(
        found,
        launch_s=min(max(launch_s, BOUNDS["launch_s"].low), BOUNDS["launch_s"].high),
        serial_s=min(max(launch_s, within.low), within.high),
        intra_efficiency=1.0, inter_efficiency=1.0, micro_batch_s=0.0, step_s=0.0, overlap=0.0,
    )  # fmt: skip
    connection = link_of(measured)
    here = replace(
        cluster("local"), name="measured", title=measured.machine, gpu=chip, gpus_per_node=measured.setups[-1].ranks,
        intra=connection, inter=connection,
    )  # fmt: skip
    update = _update(setup, "update")
    sharded = _update(setup, "sharded") if any(one.what == "sharded" for one in setup.timings) else update
    engines = {kind: _engine(setup, kind) for kind in ENGINES if any(one.what == kind for one in setup.timings)}
    meeting_s = statistics.median([one.seconds for one in setup.timings if one.what == "meeting"] or [0.0])
    residuals = (
        *(_of_product(one, fair, chip, found, launch_s) for one, fair in zip(some, products, strict=True)),
        *_of_passes(setup, chip, found),
        *_of_updates(setup, update),
        *_of_messages(setup, connection),
    )
    beyond = min(max(chained(setup.timings) or 1.0, 1 / MOST_CHAINED), MOST_CHAINED)
    return Site(setup.ranks, here, found, update, sharded, engines, meeting_s, beyond, residuals)


def _product(one: Timed) -> Product:
    m, n, k, times = one.size
    return Product(m, n, k, times, attention=one.what == "attention")


def _chip(
    measured: Measured,
    products: Sequence[tuple[Product, float]],
    passes: Sequence[tuple[float, float]],
    precision: Precision,
) -> Gpu:
    """The processor; a CPU's peaks are its own best product and median pass, as nobody publishes them for one core."""
    if measured.gpu != "cpu":
        return gpu(measured.gpu)
    chip = gpu("cpu")
    best = max(product.flops / seconds for product, seconds in products)
    moved = statistics.median(num_bytes / seconds for num_bytes, seconds in passes)
    share = measured.memory_bytes // measured.setups[-1].ranks
    return replace(
        chip, device=replace(chip.device, memory_bytes=share), peak_flops={precision: best / BEST_SHARE},
        memory_bytes_per_s=moved / MEMORY_SHARE, num_sms=1,
    )  # fmt: skip


def _with_start(
    found: Calibration, chip: Gpu, products: Sequence[tuple[Product, float]], precision: Precision
) -> Calibration:
    """The same with the inner size at half speed, and the efficiencies, that leave the least mean error."""
    kinds = (("product_efficiency", False), ("attention_efficiency", True))

    def tried(start: float) -> tuple[float, Calibration]:
        made = replace(found, product_start=start)
        for name, attention in kinds:
            own = [one for one in products if one[0].attention == attention]
            if own:
                shift = statistics.median(product_s(one, chip, made, precision) / seconds for one, seconds in own)
                bound = BOUNDS[name]
                changed: dict[str, Any] = {name: min(max(getattr(made, name) * shift, bound.low), bound.high)}
                made = replace(made, **changed)
        errors = [abs(np.log(product_s(product, chip, made, precision) / seconds)) for product, seconds in products]
        return float(np.mean(errors)), made

    return min((tried(start) for start in STARTS), key=lambda one: one[0])[1]


def _update(setup: Setup, what: str) -> Line:
    rows = [(one.size[0], one.size[0] * one.size[1], one.seconds) for one in setup.timings if one.what == what]
    return line([(float(tensors), float(elements), seconds) for tensors, elements, seconds in rows])


def _engine(setup: Setup, kind: str) -> Line:
    rows = [(one.size, one.seconds) for one in setup.timings if one.what == kind]
    return line([(float(size[0]), float(size[1]) if len(size) > 1 else 0.0, seconds) for size, seconds in rows])


def _of_product(one: Timed, fair: tuple[Product, float], chip: Gpu, found: Calibration, launch_s: float) -> Residual:
    own = one.seconds - fair[1] if fair[1] > LEAST_LEFT * one.seconds else launch_s
    fitted_s = product_s(fair[0], chip, found, one.precision) + own
    return Residual(one.what, one.label, fair[0].flops, one.seconds, fitted_s)


def _of_passes(setup: Setup, chip: Gpu, found: Calibration) -> list[Residual]:
    speed = chip.memory_bytes_per_s * found.memory_efficiency
    return [
        Residual("pass", one.label, one.size[0], one.seconds, one.size[0] / speed)
        for one in setup.timings
        if one.what == "pass"
    ]


def _of_updates(setup: Setup, update: Line) -> list[Residual]:
    return [
        Residual(
            "update", one.label, one.size[0] * one.size[1], one.seconds,
            one.size[0] * update.start + one.size[0] * one.size[1] * update.slope,
        )
        for one in setup.timings
        if one.what == "update"
    ]  # fmt: skip


def _of_messages(setup: Setup, connection: Interconnect) -> list[Residual]:
    found = []
    for point in setup.points:
        name = cast(Collective, point.collective)
        fitted_s = float(connection.time_s(name, point.size, point.message_bytes))
        found.append(Residual(point.collective, point.collective, point.message_bytes, point.time_s, fitted_s))
    return found
