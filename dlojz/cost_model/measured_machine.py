"""Machine as measured (`dlojz calibrate`): its file, and the seconds of a step that follow from it.

The file keeps raw measurements, so that a later version reads more out of them, and a checksum of its content. Each
number of ranks has its own processor, because ranks that share cores are slower; every parameter comes from
measurements of what it stands for, none from the time of a model, and `residuals` compares each measurement with what
the parameters say of it. Each is a median, so that one disturbed measurement does not count.

The parts of a step are those of `dlojz.cost_model.step`, with what a CPU's host adds: an operation is over before the
next is launched, the update counts its tensors, the engines' code costs what it cost on blocks that compute nothing,
and a message between two computations waits for the ranks to wake up.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Self, cast, get_args

import numpy as np
from pydantic import Field, model_validator

from dlojz import models
from dlojz.base.contract import Contract, parse_json
from dlojz.base.errors import LabError
from dlojz.base.files import config_folder, write_atomic
from dlojz.base.language import Sentences, decimal, percent, say
from dlojz.by_hand.collectives.running import TimedMessage
from dlojz.config.run_config import RunConfig
from dlojz.cost_model.calibration import BOUNDS, LEAST_LEFT, Calibration, Product
from dlojz.cost_model.layouts import SCHEDULES, Layouts, Reals
from dlojz.cost_model.measuring import LONG_PRODUCTS, MEETING_PRODUCTS, Timed, chained
from dlojz.cost_model.step import Parts, step_parts
from dlojz.cost_model.workload import product_s, workload
from dlojz.hardware import Cluster, Device, Precision, cluster, gpu
from dlojz.hardware.links import Collective, Interconnect, bus_factor, fit_line

MOST_BYTES: Final = 4_000_000
"""A file of this kind has some tens of kilobytes."""
DATE_FORMAT: Final = "%Y-%m-%d %H:%M UTC"
KINDS: Final[dict[str, int | None]] = {
    "product": 4, "attention": 4, "convolution": 4, "pass": 1, "launch": 0, "update": 2, "sharded": 2, "checkpoint": 2,
    "ddp": 2, "fsdp2": 2, "fsdp3": 2, "dtensor": 1, "meeting": None, "straggler": 1, "chain": 3, "parts": 3,
    "kernel": None, "host": None, "level": 1,
}  # fmt: skip
"""What is timed, and how many numbers its size has (None: as many as the case has, 0 among them);
`dlojz.cost_model.measuring` and `measuring_kernels` say what."""
NEEDED: Final = ("product", "pass", "launch", "update")
_FILE: Final = Path(__file__).with_name("data") / "measured.md"
_sentence = Sentences(_FILE)
_refused = _sentence.refused
"""A sentence about measurements, by its key, and the error that says one."""


class Setup(Contract):
    """Measurements of one number of ranks.

    Raises:
        LabError: if a measurement is missing, or not above 0 s.
    """

    ranks: int = Field(ge=1, le=1024, description="processes that worked at the same time")
    timings: tuple[Timed, ...] = Field(description="computation, on one of them")
    points: tuple[TimedMessage, ...] = Field((), description="messages between all of them")

    @model_validator(mode="after")
    def _whole(self) -> Self:
        for timing in self.timings:
            numbers = KINDS.get(timing.what, -1)
            # None: any number of sizes, 0 among them.
            fits = numbers is None or (numbers == len(timing.size) and all(part > 0 for part in timing.size))
            if not (fits and 0 < timing.seconds < math.inf):
                raise _refused("timing", kinds=", ".join(KINDS), timing=tuple(timing))
        for point in self.points:
            if not (point.message_bytes > 0 and 0 < point.time_s < math.inf and point.size == self.ranks):
                raise _refused("message", ranks=self.ranks, point=tuple(point))
        absent = [kind for kind in NEEDED if not any(timing.what == kind for timing in self.timings)]
        if absent or (self.ranks > 1 and not self.points):
            lacking = ", ".join(absent) or say(en="messages", fr="les messages")
            raise _refused("lacking", ranks=self.ranks, lacking=lacking)
        return self


class Measured(Contract):
    """A machine's measurements, for one, two and more ranks.

    Raises:
        LabError: if two setups have the same number of ranks, or one rank alone was not measured.
    """

    schema_version: Literal[1] = 1
    machine: str = Field(description="its name")
    processor: str = Field(description="CPU, or the GPU's name")
    gpu: str = Field("cpu", description="name in `dlojz.hardware`, or cpu")
    multiprocessors: int = Field(1, ge=1, description="of the GPU")
    cores: int = Field(ge=1, description="that the processes could use")
    memory_bytes: int = Field(ge=1, description="of the GPU, or of the machine")
    date: str = Field(description="when")
    versions: dict[str, str] = Field(description="of the libraries")
    load: float = Field(0.0, ge=0, description="processes that wanted a core before the measurement began")
    setups: tuple[Setup, ...] = Field(min_length=1, description="by number of ranks")

    # `versions` is a dict, which has no hash, and the caches below take machines as keys.
    def __hash__(self) -> int:
        return hash((self.machine, self.date, len(self.setups)))

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        ranks = [setup.ranks for setup in self.setups]
        if ranks != sorted(set(ranks)) or ranks[0] != 1:
            raise _refused("setups", ranks=ranks)
        return self

    @property
    def age_s(self) -> float | None:
        """Seconds since the measurement; None where its date has no hour."""
        try:
            measured_at = datetime.strptime(self.date, DATE_FORMAT).replace(tzinfo=UTC)
        except ValueError:
            return None
        return max(0.0, (datetime.now(UTC) - measured_at).total_seconds())

    def noise(self, ranks: int) -> float:
        """Median relative residual of so many ranks' measurements: how far the parameters miss what they stand for."""
        return site(self, ranks).median_error

    def words(self, ranks: int) -> str:
        """Say how old the calibration is, how noisy, and how busy the machine then was."""
        age = "" if self.age_s is None else f"{format_age(self.age_s)}, "
        noise, load = percent(self.noise(ranks), 0), decimal(self.load, 1)
        return _sentence("calibrated", date=self.date, age=age, noise=noise, load=load)

    @property
    def gpu_is_measured(self) -> bool:
        """Whether a GPU's kernels were measured, of a model that is known or not."""
        return any(timing.what == "kernel" for timing in self.setups[0].timings)

    def setup(self, ranks: int) -> Setup:
        """Look up the measurements of a number of ranks, or of the next larger one.

        Raises:
            LabError: if fewer ranks were measured.
        """
        for setup in self.setups:
            if setup.ranks >= ranks:  # ascending: the first that is enough
                return setup
        raise _refused("ranks", most=self.setups[-1].ranks, ranks=ranks)


def format_age(age_s: float) -> str:
    """Write an age in whole minutes, hours or days."""
    for seconds, english, french in ((86_400, "day", "jour"), (3600, "hour", "heure"), (60, "minute", "minute")):
        if age_s >= seconds:
            count = int(age_s // seconds)
            plural = "s" * (count > 1)
            return say(en=f"{count} {english}{plural} old", fr=f"il y a {count} {french}{plural}")
    return say(en="just now", fr="à l’instant")


def default_path() -> Path:
    """Path of the user's calibration: `$XDG_CONFIG_HOME/dlojz/calibration.json`, else under `~/.config`."""
    return config_folder() / "calibration.json"


def _checksum(content: dict[str, Any]) -> str:
    # One text for one content, whatever the order of its keys.
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def write_measured(path: Path, measured: Measured) -> None:
    """Write the file atomically, with the checksum of its content under the key `sha256`.

    Raises:
        LabError: if the folder cannot be written.
    """
    content = measured.to_dict()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps({**content, "sha256": _checksum(content)}, indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        raise _refused("unwritten", path=path, reason=error.strerror) from None


def read_measured(path: Path | None = None) -> Measured:
    """Read a machine's measurements; by default the user's own.

    Raises:
        LabError: if there is no such file, or it is damaged, altered, or written by a newer version.
    """
    path = path or default_path()

    def damaged(reason: str) -> LabError:
        return _refused("damaged", name=path.name, reason=reason)

    try:
        if path.stat().st_size > MOST_BYTES:
            raise damaged(say(en="it is too large.", fr="il est trop gros."))
        content = parse_json(path.read_bytes())
    except OSError as error:
        raise _refused("no file", path=path, reason=error.strerror) from None
    except LabError as error:
        # Errors of the file itself already name it.
        raise error if path.name in str(error) else damaged(str(error)) from None
    if not isinstance(content, dict):
        raise damaged(say(en="it holds no JSON object.", fr="ce n’est pas un objet JSON."))
    version = content.get("schema_version")
    if isinstance(version, int) and version > 1:
        raise _refused("newer", name=path.name, version=version)
    stored = content.pop("sha256", None)
    if stored != _checksum(content):
        raise damaged(say(en="its checksum does not match.", fr="sa somme de contrôle ne correspond pas."))
    try:
        return Measured.from_dict(content)
    except LabError as error:
        raise damaged(str(error)) from None


def from_measurements(
    name: str,
    gpu: Device,
    *,
    products: Sequence[tuple[Product, float]],
    passes: Sequence[tuple[float, float]],
    precision: Precision = "fp32",
) -> Calibration:
    """Derive a calibration from a machine's measurements.

    Args:
        gpu: whose peaks the efficiencies refer to; for this machine its own best product and pass.

    Raises:
        LabError: without a product or a pass, or if a time is not above 0.
    """
    measurements: dict[str, list[float]] = {
        "products": [pair[1] for pair in products],
        "passes": [pair[1] for pair in passes],
    }
    for kind, seconds_of in measurements.items():
        if not seconds_of or min(seconds_of) <= 0:
            raise _refused("no measurements", kind=kind, received=seconds_of[:3])
    # With all efficiencies at their bounds, predicted ÷ measured is the share of the best that was reached.
    perfect = replace(
        Calibration(name), product_efficiency=BOUNDS["product_efficiency"].high,
        attention_efficiency=BOUNDS["attention_efficiency"].high, memory_efficiency=BOUNDS["memory_efficiency"].high,
        product_start=0.0, unaligned=1.0,
    )  # fmt: skip
    memory_efficiency = statistics.median(num_bytes / seconds for num_bytes, seconds in passes) / gpu.memory_bytes_per_s

    def speed(attention: bool) -> float | None:
        shares = [
            product_s(product, gpu, perfect, precision) / seconds
            for product, seconds in products
            if product.attention == attention
        ]
        # Shares refer to the bound, not to 1.
        reach = perfect.attention_efficiency if attention else perfect.product_efficiency
        return statistics.median(shares) * reach if shares else None

    products_speed, attention_speed = speed(False), speed(True)
    parameters = {
        "product_efficiency": products_speed or attention_speed or 1.0,
        "attention_efficiency": attention_speed or products_speed or 1.0,
        "memory_efficiency": memory_efficiency,
    }
    # A disturbed measurement may lie beyond what is physical.
    within: dict[str, Any] = {key: BOUNDS[key].clip(value) for key, value in parameters.items()}
    return replace(perfect, **within)


BEST_SHARE: Final = 0.9
"""Of a CPU's peak, what its best product is taken to reach: only the product of both counts."""
MEMORY_SHARE: Final = 0.8
"""The same of the memory and the median pass."""
STARTS: Final = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""Inner sizes at half speed that are tried."""


MOST_CHAINED: Final = 2.0
"""A chain that takes more than twice its parts, or less than half, was disturbed."""
ENGINES: Final = ("checkpoint", "ddp", "fsdp2", "fsdp3", "dtensor")


class FittedLine(NamedTuple):
    """Seconds as a linear function of two numbers: start · a + slope · b.

    Attributes:
        start: seconds per message, per tensor, or per block.
        slope: seconds per byte, per element, or per tensor.
    """

    start: float
    slope: float


class Residual(NamedTuple):
    """Residual: a measurement, and what the parameters say of it.

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
        """Relative error: 0.1 means that the parameters say 10 % more than was measured."""
        return self.fitted_s / self.measured_s - 1


@dataclass(frozen=True)
class MeasuredSite:
    """A machine as the cost model takes it, for one number of ranks.

    Attributes:
        ranks: that share it.
        cluster: its processor and links.
        calibration: how far of the peaks it stays.
        update: seconds of AdamW per tensor and per element.
        sharded: the same of tensors split over the ranks.
        engines: seconds that each kind of `measuring_engines` adds per block and per tensor, `dtensor` per message.
        meetings: seconds of an all-reduce between two computations, by the size of the group that meets while all
            ranks are busy.
        straggling: seconds by which the wait for the slowest rank grows with each second of computation before it.
        chained: times that a chain of operations takes as long as its parts say; 1 where none was measured.
        residuals: of every measurement.
    """

    ranks: int
    cluster: Cluster
    calibration: Calibration
    update: FittedLine
    sharded: FittedLine
    engines: Mapping[str, FittedLine]
    meetings: Mapping[int, float]
    straggling: float
    chained: float
    residuals: tuple[Residual, ...]

    def engine_s(self, kind: str, blocks: float, tensors: float = 0.0) -> float:
        """Seconds that an engine adds to so many blocks with so many tensors; 0 where it was not measured."""
        fitted_line = self.engines.get(kind, FittedLine(0.0, 0.0))
        return blocks * fitted_line.start + tensors * fitted_line.slope

    def meeting_s(self, ranks: int) -> float:
        """Seconds of an all-reduce of so many ranks between two computations; as of all ranks where not measured."""
        return self.meetings.get(ranks, self.meetings.get(self.ranks, 0.0))

    @property
    def median_error(self) -> float:
        """Median of the residuals' absolute values."""
        return statistics.median(abs(residual.error) for residual in self.residuals)


def line(rows: Sequence[tuple[float, float, float]]) -> FittedLine:
    """Fit start and slope by least squares of relative errors: `dlojz.hardware.links.fit_line`."""
    return FittedLine(*fit_line(rows))


def link_of(measured: Measured) -> Interconnect:
    """Derive the link between this machine's ranks: α and bus bandwidth of each collective by number of ranks.

    A collective that was not measured is taken as slow as an all-reduce; one rank alone has no messages.
    """
    collectives = get_args(Collective)
    alpha: dict[str, dict[int, float]] = {name: {} for name in collectives}
    bandwidth: dict[str, dict[int, float]] = {name: {} for name in collectives}
    for setup in measured.setups:
        measured_names = {point.collective for point in setup.points}
        for name in collectives if measured_names else ():  # one rank has no messages
            source_name = name if name in measured_names else "all_reduce"
            points = [point for point in setup.points if point.collective == source_name]
            factor = bus_factor(cast(Collective, source_name), setup.ranks)
            # Seconds = α + slope · bytes on the wire of one rank.
            fitted_line = line([(1.0, factor * point.message_bytes, point.time_s) for point in points])
            alpha[name][setup.ranks] = fitted_line.start
            bandwidth[name][setup.ranks] = 1 / max(fitted_line.slope, 1e-15)
    if not alpha["all_reduce"]:
        return cluster("local").intra  # placeholders: a single rank sends nothing
    return Interconnect("measured", f"{measured.machine}, {measured.date}", alpha, bandwidth, {})


def site(measured: Measured, ranks: int = 1, *, image: bool = True, precision: Precision = "fp32") -> MeasuredSite:
    """Describe the machine while so many ranks share it.

    Args:
        ranks: processes of the run, at least 1.
        image: whether the model has convolutions, which then count among the products.

    Raises:
        LabError: if so many ranks, or this precision, were not measured.
    """
    setup = measured.setup(ranks)
    launch_s = statistics.median(timing.seconds for timing in setup.timings if timing.what == "launch")
    on_gpu = measured.gpu != "cpu"
    # On a GPU a convolution in fp32 is computed in TF32, and launches wait for no product.
    kinds = ("product", "attention", "convolution") if image and not on_gpu else ("product", "attention")
    # On a CPU a timed product includes its own launch, which the model counts by itself.
    begun_s = 0.0 if on_gpu else launch_s
    product_timings = [timing for timing in setup.timings if timing.what in kinds and timing.precision == precision]
    if not any(timing.what == "product" for timing in product_timings):
        raise _refused("precision", precision=precision)
    # Never less than LEAST_LEFT of it.
    products = [
        (_product(timing), max(timing.seconds - begun_s, LEAST_LEFT * timing.seconds)) for timing in product_timings
    ]
    passes = [(float(timing.size[0]), timing.seconds) for timing in setup.timings if timing.what == "pass"]
    chip = _chip(measured, products, passes, precision)
    calibration = _with_start(
        from_measurements("measured", chip, products=products, passes=passes, precision=precision), chip, products,
        precision,
    )  # fmt: skip
    calibration = replace(
        calibration,
        launch_s=BOUNDS["launch_s"].clip(launch_s), serial_s=BOUNDS["serial_s"].clip(launch_s),
        # The links and launches were measured as they are: nothing is left to a fitted share.
        intra_efficiency=1.0, inter_efficiency=1.0, micro_batch_s=0.0, step_s=0.0, overlap=0.0,
    )  # fmt: skip
    connection = link_of(measured)
    local_cluster = replace(
        cluster("local"), name="measured", title_en=measured.machine, gpu=chip, gpus_per_node=measured.setups[-1].ranks,
        intra=connection, inter=connection,
    )  # fmt: skip
    update = _update(setup, "update")
    sharded = _update(setup, "sharded") if any(timing.what == "sharded" for timing in setup.timings) else update
    engines = {kind: _engine(setup, kind) for kind in ENGINES if any(timing.what == kind for timing in setup.timings)}
    # Without a size: of all ranks.
    meetings = {
        timing.size[0] if timing.size else ranks: timing.seconds for timing in setup.timings if timing.what == "meeting"
    }
    residuals = (
        *(
            _of_product(timing, fair, chip, calibration, begun_s)
            for timing, fair in zip(product_timings, products, strict=True)
        ),
        *_residuals(setup, chip, calibration, update, connection),
    )
    beyond = min(max(chained(setup.timings) or 1.0, 1 / MOST_CHAINED), MOST_CHAINED)
    straggling = _straggling(setup, meetings.get(ranks, 0.0))
    return MeasuredSite(
        setup.ranks, local_cluster, calibration, update, sharded, engines, meetings, straggling, beyond, residuals
    )


def _straggling(setup: Setup, short_s: float) -> float:
    """By how many seconds a meeting takes longer per second of work before it; 0 where that was not measured.

    Where several lengths of work were measured, the mean of their slopes from the short meeting on.
    """
    long = [timing for timing in setup.timings if timing.what == "straggler"]
    # Seconds of one product, from the shortest of the long works, which has LONG_PRODUCTS[0] of them.
    short_work_s = 1e-6 * min((timing.size[0] for timing in long), default=0) * MEETING_PRODUCTS / LONG_PRODUCTS[0]
    slopes = [(timing.seconds - short_s) / (1e-6 * timing.size[0] - short_work_s) for timing in long]
    return max(0.0, statistics.fmean(slopes)) if slopes else 0.0


def _product(timing: Timed) -> Product:
    m, n, k, times = timing.size
    return Product(m, n, k, times, attention=timing.what == "attention")


def _chip(
    measured: Measured,
    products: Sequence[tuple[Product, float]],
    passes: Sequence[tuple[float, float]],
    precision: Precision,
) -> Device:
    """The processor; a CPU's peaks are its own best product and median pass, as nobody publishes them for one core."""
    if measured.gpu != "cpu":
        return gpu(measured.gpu)
    chip = gpu("cpu")
    best = max(product.flops / seconds for product, seconds in products)
    bytes_per_s = statistics.median(num_bytes / seconds for num_bytes, seconds in passes)
    share = measured.memory_bytes // measured.setups[-1].ranks  # ranks share the memory
    return replace(
        chip, memory_bytes=share, peak_flops={precision: best / BEST_SHARE},
        memory_bytes_per_s=bytes_per_s / MEMORY_SHARE, num_sms=1,  # one core: no others that could idle in a last wave
    )  # fmt: skip


def _with_start(
    calibration: Calibration, chip: Device, products: Sequence[tuple[Product, float]], precision: Precision
) -> Calibration:
    """The same with the inner size at half speed, and the efficiencies, that leave the least mean error."""
    kinds = (("product_efficiency", False), ("attention_efficiency", True))

    def tried(start: float) -> tuple[float, Calibration]:
        trial = replace(calibration, product_start=start)
        for name, attention in kinds:
            kind_products = [pair for pair in products if pair[0].attention == attention]
            if kind_products:
                # Median of predicted ÷ measured: times the efficiency, the median error is 0.
                shift = statistics.median(
                    product_s(product, chip, trial, precision) / seconds for product, seconds in kind_products
                )
                changed: dict[str, Any] = {name: BOUNDS[name].clip(getattr(trial, name) * shift)}
                trial = replace(trial, **changed)
        errors = [abs(np.log(product_s(product, chip, trial, precision) / seconds)) for product, seconds in products]
        return float(np.mean(errors)), trial

    return min((tried(start) for start in STARTS), key=lambda pair: pair[0])[1]


def _update(setup: Setup, kind: str) -> FittedLine:
    # Seconds = start · tensors + slope · all elements.
    rows = [
        (timing.size[0], timing.size[0] * timing.size[1], timing.seconds)
        for timing in setup.timings
        if timing.what == kind
    ]
    return line([(float(tensors), float(elements), seconds) for tensors, elements, seconds in rows])


def _engine(setup: Setup, kind: str) -> FittedLine:
    rows = [(timing.size, timing.seconds) for timing in setup.timings if timing.what == kind]
    return line([(float(size[0]), float(size[1]) if len(size) > 1 else 0.0, seconds) for size, seconds in rows])


def _residuals(
    setup: Setup, chip: Device, calibration: Calibration, update: FittedLine, connection: Interconnect
) -> Iterator[Residual]:
    """Residuals of passes, updates and messages; those of products are `_of_product`'s."""
    speed = chip.memory_bytes_per_s * calibration.memory_efficiency
    for timing in setup.timings:
        if timing.what == "pass":
            yield Residual("pass", timing.label, timing.size[0], timing.seconds, timing.size[0] / speed)
    for timing in setup.timings:
        if timing.what == "update":
            elements = timing.size[0] * timing.size[1]
            fitted_s = timing.size[0] * update.start + elements * update.slope
            yield Residual("update", timing.label, elements, timing.seconds, fitted_s)
    for point in setup.points:
        fitted_s = float(connection.time_s(cast(Collective, point.collective), point.size, point.message_bytes))
        yield Residual(point.collective, point.collective, point.message_bytes, point.time_s, fitted_s)


def _of_product(
    timing: Timed, fair: tuple[Product, float], chip: Device, calibration: Calibration, launch_s: float
) -> Residual:
    # What was taken off the measurement comes back.
    overhead_s = timing.seconds - fair[1] if fair[1] > LEAST_LEFT * timing.seconds else launch_s
    fitted_s = product_s(fair[0], chip, calibration, timing.precision) + overhead_s
    return Residual(timing.what, timing.label, fair[0].flops, timing.seconds, fitted_s)


ENGINE = "megatron"
"""Whose habits the cost model takes: waits for its neighbours, reduces once per step."""


COMPUTING = ("forward", "backward", "recompute", "bubble")
"""Parts that take as long as operations do."""


class Tensors(NamedTuple):
    """A model's parameters.

    Attributes:
        blocks: of the model, each gathered at a time by ZeRO-3.
    """

    tensors: int
    elements: int
    blocks: int


@lru_cache(maxsize=32)
def tensors_of(model: str, image_size: int | None, sequence_length: int | None, num_classes: int) -> Tensors:
    """Count a model's parameters on the meta device."""
    from dlojz.prediction.shapes import build_on_meta

    built = build_on_meta(model, image_size, sequence_length, num_classes)
    sizes = [parameter.numel() for parameter in built.parameters()]
    return Tensors(len(sizes), sum(sizes), len(list(built.blocks)))


def local_parts(machine: Measured, config: RunConfig) -> Parts:
    """Predict the seconds of a step of a run on the measured machine, by part; each an array of one.

    On one GPU whose kernels were measured the step follows from these (`dlojz.cost_model.gpu_step`), and the parts are
    scaled to it.

    Args:
        machine: its measurements, with as many ranks as the run has, or more.
        config: the run; in the precision that the machine's products were measured in.

    Raises:
        LabError: for a schedule that the cost model has not, what is offloaded, an engine whose own cost is not
            measured, or more ranks than were measured.
    """
    layout = config.layout
    schedule = layout.schedule or "1f1b"
    if schedule not in SCHEDULES or layout.offload != "none" or layout.engine == "deepspeed":
        raise _refused("no step", schedules=", ".join(SCHEDULES), schedule=schedule, layout=layout)
    image = models.spec(config.model).family == "image"
    local_site = _site(machine, layout.world_size, image, config.compute_precision)
    parts = _computed(machine, config, image)
    model_tensors = tensors_of(config.model, config.image_size, config.sequence_length, config.num_classes)
    tensor, pipeline = _met(machine, local_site, config, parts)
    computed_s = float(sum(getattr(parts, part)[0] for part in COMPUTING))
    adjusted_parts = replace(
        parts,
        recompute=parts.recompute + _recomputing_s(local_site, config, model_tensors),
        tensor=tensor,
        pipeline=pipeline,
        data=parts.data + _wrapping_s(machine, local_site, config, model_tensors, computed_s),
        optimizer=np.array([update_s(local_site, config, model_tensors)]),
    )
    kernels = _kernels(machine) if machine.gpu != "cpu" else None
    if kernels is None or not kernels.knows(config):
        return adjusted_parts
    scale = kernels.step_s(config) / adjusted_parts.step_s
    return Parts(*(getattr(adjusted_parts, field.name) * scale for field in fields(Parts)))


def local_step_s(machine: Measured, config: RunConfig) -> float:
    """Predict the seconds of a step of a run on the measured machine: the sum of `local_parts`."""
    return float(local_parts(machine, config).step_s[0])


@lru_cache(maxsize=4)
def _kernels(machine: Measured) -> Any:
    from dlojz.cost_model.gpu_step import Kernels  # loads torch

    return Kernels(machine.setup(1).timings)


@lru_cache(maxsize=16)
def _site(machine: Measured, ranks: int, image: bool, precision: Precision) -> MeasuredSite:
    return site(machine, ranks, image=image, precision=precision)


def _computed(machine: Measured, config: RunConfig, image: bool) -> Parts:
    """The cost model's parts. Where stages wait, fewer ranks compete for the cores than there are.

    Of p stages, m·v/(m·v + p − 1) compute at a time on average; between two numbers of ranks that were measured, times
    are taken to be on a line.
    """
    layout = config.layout
    columns = Layouts.of(
        precision=config.compute_precision, dp=layout.dp, tp=layout.tp, pp=layout.pp, zero=layout.zero,
        # `gradient_bytes=4`: gradients are accumulated in fp32 here.
        micro_batch=layout.micro_batch, micro_batches=layout.micro_batches, checkpointing=layout.checkpointing,
        schedule=layout.schedule or "1f1b", chunks=_chunks(config), gradient_bytes=4, engine=ENGINE,
        blocking=int(machine.gpu == "cpu"),
    )  # fmt: skip
    work = workload(config.model, config.image_size, config.sequence_length)

    def of(ranks: int) -> Parts:
        local_site = _site(machine, ranks, image, config.compute_precision)
        parts = step_parts(work, local_site.cluster, columns, local_site.calibration)
        # Operations in a chain, against each alone.
        return replace(parts, **{name: local_site.chained * getattr(parts, name) for name in COMPUTING})

    all_busy = of(layout.world_size)
    if layout.pp == 1:
        return all_busy
    slots = layout.micro_batches * _chunks(config)
    busy = layout.world_size * slots / (slots + layout.pp - 1)  # ranks that compute at a time, on average
    below = max(
        setup.ranks for setup in machine.setups if setup.ranks <= busy
    )  # one rank alone was measured in any case
    above = min(setup.ranks for setup in machine.setups if setup.ranks >= busy)
    share = (busy - below) / (above - below) if above > below else 0.0  # 0 at `below`, 1 at `above`
    few, many = of(below), of(above)
    # Between both, linearly.
    mixed = {name: (1 - share) * getattr(few, name) + share * getattr(many, name) for name in COMPUTING}
    return replace(all_busy, **mixed)


def _chunks(config: RunConfig) -> int:
    # Two chunks where a run names none.
    return (config.layout.chunks or 2) if config.layout.schedule == "interleaved" else 1


def update_s(local_site: MeasuredSite, config: RunConfig, model_tensors: Tensors) -> float:
    """Seconds of AdamW on one rank: per tensor, and per element of its share.

    Tensors are counted whole on each rank of ZeRO and tensor parallelism, where every rank has a part of each, and
    split by a pipeline. Where torch keeps the parts together (DTensor), each operation costs the host more.
    """
    layout = config.layout
    parts = layout.tp * layout.pp * (layout.dp if layout.zero else 1)  # ranks that the elements are divided among
    distributed = layout.engine == "torch" and (layout.zero >= 2 or layout.tp > 1) and layout.world_size > 1
    fitted_line = local_site.sharded if distributed else local_site.update
    return (
        model_tensors.tensors / layout.pp * fitted_line.start + model_tensors.elements / parts * local_site.update.slope
    )


def _wrapping_s(
    machine: Measured, local_site: MeasuredSite, config: RunConfig, model_tensors: Tensors, computed_s: float
) -> float:
    """What data parallelism's engine costs a step beyond its bytes: FSDP2 for every micro-batch, DDP once.

    Ranks under DDP meet once, after all their computation, when they have come apart; those of FSDP2 at every block.
    """
    layout = config.layout
    if layout.dp == 1:
        return 0.0
    blocks, tensors = model_tensors.blocks / layout.pp, model_tensors.tensors / layout.pp
    if layout.zero < 2:
        engine_s = _group_engine_s(machine, local_site, config, "ddp", layout.dp, blocks, tensors)
        return engine_s + local_site.straggling * computed_s
    kind = f"fsdp{layout.zero}"
    return layout.micro_batches * _group_engine_s(machine, local_site, config, kind, layout.dp, blocks, tensors)


def _group_engine_s(
    machine: Measured,
    local_site: MeasuredSite,
    config: RunConfig,
    kind: str,
    group: int,
    blocks: float,
    tensors: float = 0.0,
) -> float:
    """Seconds that an engine of a group of ranks costs while all ranks are busy.

    Of all of them it was measured so. A smaller group meets fewer ranks: it costs what it did on so many alone, as much
    slower as launches are where all share the cores.
    """
    if group >= local_site.ranks:
        return local_site.engine_s(kind, blocks, tensors)
    image = models.spec(config.model).family == "image"
    alone = _site(machine, group, image, config.compute_precision)
    return alone.engine_s(kind, blocks, tensors) * local_site.calibration.serial_s / alone.calibration.serial_s


def _recomputing_s(local_site: MeasuredSite, config: RunConfig, model_tensors: Tensors) -> float:
    """What checkpointing costs a step beyond computing again."""
    layout = config.layout
    if layout.checkpointing != "full":
        return 0.0
    micro_batch_s = local_site.engine_s(
        "checkpoint", model_tensors.blocks / layout.pp, model_tensors.tensors / layout.pp
    )
    return layout.micro_batches * micro_batch_s


def _met(machine: Measured, local_site: MeasuredSite, config: RunConfig, parts: Parts) -> tuple[Reals, Reals]:
    """Messages of tensor parallelism and between stages: each met between computations, with torch's own code around.

    Beside its bytes a message costs what an all-reduce between two computations took, instead of its start after
    another one; layers split by torch cost the host's dispatch too.
    """
    layout = config.layout

    def start_s(ranks: int) -> float:
        return float(local_site.cluster.intra.alpha_s("all_reduce", ranks))

    def waiting_s(ranks: int) -> float:
        return max(0.0, local_site.meeting_s(ranks) - start_s(ranks))  # beyond α, which the cost model has counted

    tensor, pipeline = parts.tensor, parts.pipeline
    if layout.tp > 1:
        # The host's dispatch, without the start of its message.
        around = (
            max(0.0, _group_engine_s(machine, local_site, config, "dtensor", layout.tp, 1) - start_s(layout.tp))
            if layout.engine == "torch"
            else 0.0
        )
        tensor = tensor + _tensor_messages(config) * (waiting_s(layout.tp) + around)
    if layout.pp > 1:
        # 2: forward and backward. A message goes from one stage to the next: two ranks meet, whatever the others do.
        pipeline = pipeline + 2 * layout.micro_batches * _chunks(config) * waiting_s(2)
    return tensor, pipeline


def _tensor_messages(config: RunConfig) -> int:
    """How many messages a rank's step has along the tensor axis.

    Source: `dlojz.prediction.communication`, which the probe confirms.
    """
    from dlojz.prediction.communication import tensor_traffic
    from dlojz.prediction.shapes import RankPart

    traffic = tensor_traffic(RankPart(config))
    return sum(message.count or 0 for message in traffic)
