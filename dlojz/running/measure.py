"""Measure by runs: libraries side by side, the calibration of this machine, layouts side by side.

What is compared takes turns, round after round, so that other work of the machine slows all of them down alike. The
processes are gone when a measurement ends. On CPUs they are forked and have one thread each, as the launcher's ranks
have; on GPUs each has its own.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import json
import math
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from dlojz.base.display_hook import wanted
from dlojz.base.errors import LabError
from dlojz.base.language import Sentences
from dlojz.base.machine import cores_available, machine_limit, processor_name
from dlojz.config.run_compatibility import or_none, stage_refusal
from dlojz.config.run_config import RunConfig
from dlojz.cost_model.calibration import nearest_mean
from dlojz.cost_model.measured_machine import DATE_FORMAT, Measured, Setup, default_path, read_measured, write_measured
from dlojz.cost_model.measuring import WINDOW_S, WINDOWS, Timed, measure_rank
from dlojz.cost_model.measuring_kernels import PRECISIONS, SUSTAINED, measure_kernels
from dlojz.cost_model.workload import FusedAttention
from dlojz.hardware import DEVICES, Device, Precision
from dlojz.hardware.constants import Constant
from dlojz.hardware.gpus import ATTENTION_KERNELS, CPU, described, device_of_driver
from dlojz.libraries.library_catalogue import LIBRARIES, library, require
from dlojz.libraries.side_by_side import LibraryRow, rows
from dlojz.processes.forks import first_failure, spmd
from dlojz.results.record import RunRecord
from dlojz.running.launch import run

phrase = Sentences(Path(__file__).parent / "data" / "runs.md")

OnRun = Callable[[str, int], object]
"""Called with the name of the library and the number of the round before each run."""


def configurations(names: Sequence[str] | None = None, **fields: Any) -> tuple[dict[str, RunConfig], dict[str, str]]:
    """Make each library's configuration, and list why the others cannot run.

    Args:
        **fields: of `RunConfig` and `Layout`, given flat, but for the library.

    Raises:
        LabError: if a field is illegal whatever the library, or a name is unknown.
    """
    configs: dict[str, RunConfig] = {}
    refused: dict[str, str] = {}
    # First without the library: a field that is illegal for all raises once and is not a refusal of each.
    RunConfig.of(**{name: value for name, value in fields.items() if name not in ("engine", "zero")})
    for name in names or tuple(LIBRARIES):
        library(name)
        try:
            require(name)
            if (misfit := stage_refusal(name, fields.get("zero"))) is not None:
                raise LabError(misfit)
            configs[name] = RunConfig.of(**{**fields, "library": name})
        except LabError as error:
            # The table lists libraries: the advice to take none at the sentence's end is dropped, its full stop is
            # kept.
            refused[name] = str(error).removesuffix(or_none()) + "." * str(error).endswith(or_none())
    if not configs:
        raise LabError(next(iter(refused.values())))
    return configs, refused


def run_libraries(
    names: Sequence[str] | None = None,
    *,
    rounds: int = 1,
    again: bool = False,
    root: str | os.PathLike[str] | None = None,
    on_run: OnRun = lambda name, number: None,
    **fields: Any,
) -> list[LibraryRow]:
    """Run the same training with every library that is installed and has such a layout; return them side by side.

    Args:
        rounds: at least 1; the ratios of step times are taken within a round.
        again: make new runs in the first round too; the later rounds are new in any case.
        **fields: of `RunConfig` and `Layout`, given flat, but for the library.

    Raises:
        LabError: if a field is illegal, a name is unknown, or no library can be asked.

    Example:
        `run_libraries(model="gpt_tiny", dp=2, steps=20)`
    """
    if rounds < 1:
        raise phrase.refused("no round", rounds=rounds)
    configs, refused = configurations(names, **fields)
    records: dict[str, list[RunRecord | None]] = {name: [] for name in configs}
    for number, name in itertools.product(range(rounds), configs):
        on_run(name, number)
        library_run = run(configs[name], on="local", again=again or number > 0, root=root, progress=False)
        records[name].append(library_run.record)
    return rows(records, names=names, refused=refused)


Tell = Callable[[int, int], None]
Watch = Callable[[int], AbstractContextManager[Tell]]
VERSIONS_OF = ("torch", "numpy", "dlojz")
CALIBRATING_WALL_S = 180.0
CALIBRATING_LIMIT_S = 30.0
ATTEMPTS = 2
"""How often the ranks are started: on a busy machine a message may be lost."""
QUICK = {"windows": 1, "window_s": 0.01}
FULL = {"windows": WINDOWS, "window_s": WINDOW_S}


def measure_machine(
    ranks: Sequence[int] = (1, 2, 4), *, quick: bool = False, device: str = "auto", watch: Watch | None = None
) -> Measured:
    """Calibrate this machine with several numbers of ranks, all of them at work.

    Args:
        ranks: numbers that grow from 1 on; on GPUs at most as many as there are.
        quick: measure messages and engines less exactly, in about two thirds of the time.
        device: auto, cpu or cuda.
        watch: called with each number of ranks, gives a context whose function is called with the progress.

    Raises:
        LabError: if a rank fails, or there is no such device.
    """
    import torch

    on_gpu = torch.cuda.is_available() if device == "auto" else device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise phrase.refused("no GPU to measure")
    load = os.getloadavg()[0]
    rank_counts = [rank_count for rank_count in ranks if not on_gpu or rank_count <= torch.cuda.device_count()]
    pace = QUICK if quick else FULL
    setups = []
    for number in rank_counts:
        timings, points = _on_gpus(number, pace) if on_gpu else _on_cores(number, pace, watch)
        setups.append(Setup.from_dict({"ranks": number, "timings": timings, "points": points}))
    title = torch.cuda.get_device_name(0) if on_gpu else processor_name()
    memory = torch.cuda.get_device_properties(0).total_memory if on_gpu else machine_limit().num_bytes
    return Measured(
        machine=platform.node() or "local",
        processor=title,
        gpu=gpu.name if on_gpu and (gpu := device_of_driver(title)) else CPU,  # whose peaks are measured
        multiprocessors=torch.cuda.get_device_properties(0).multi_processor_count if on_gpu else 1,
        cores=cores_available(),
        memory_bytes=memory,
        date=datetime.now(UTC).strftime(DATE_FORMAT),
        versions=_versions(),
        load=load,
        setups=tuple(setups),
    )


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in VERSIONS_OF:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _on_cores(number: int, pace: dict[str, Any], watch: Watch | None) -> Any:
    """Measure on forked ranks, the first of which reports its progress."""

    def measured(rank: int, size: int) -> Any:
        if rank or watch is None:
            return [list(part) for part in measure_rank(**pace)]
        with watch(size) as tell:
            return [list(part) for part in measure_rank(**pace, tell=tell)]

    for _ in range(ATTEMPTS):
        answers = spmd(measured, number, wall_s=CALIBRATING_WALL_S, limit_s=CALIBRATING_LIMIT_S)
        failed = first_failure(answers)
        if failed is None:
            return answers[0].value
        rank, reason = failed
    raise phrase.refused("rank could not measure", rank=rank, number=number, reason=reason)


def _on_gpus(number: int, pace: dict[str, Any]) -> Any:
    """Measure on spawned processes, one GPU each, joined by NCCL; a single one needs no other process."""
    if number == 1:
        import torch

        timings, points = measure_rank(**pace)
        device = torch.device("cuda", torch.cuda.current_device())
        return [[*timings, *measure_kernels(device, rounds=pace["windows"])], points]
    from torch.multiprocessing.spawn import spawn

    with tempfile.TemporaryDirectory(prefix="dlojz-calibrate-") as folder:
        spawn(_gpu_rank, args=(number, folder, pace), nprocs=number)
        return json.loads((Path(folder) / "answer.json").read_text(encoding="utf-8"))


def _gpu_rank(rank: int, number: int, folder: str, pace: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    # The ranks meet through a file, which needs no free port.
    store = dist.FileStore(str(Path(folder) / "store"), number)  # type: ignore[attr-defined]
    dist.init_process_group("nccl", store=store, rank=rank, world_size=number)
    answer = [list(part) for part in measure_rank(**pace)]
    if rank == 0:
        (Path(folder) / "answer.json").write_text(json.dumps(answer), encoding="utf-8")
    # Who: all ranks. What: a barrier, as no rank may leave while another still measures. How much: a few bytes.
    dist.barrier()
    dist.destroy_process_group()


WARM: Final = 2
"""Steps of each layout that are not counted."""
CHOOSING_WALL_S: Final = 600.0
CHOOSING_LIMIT_S: Final = 300.0
MOST_ROUNDS: Final = 1000


def calibrated(
    ranks: Sequence[int] = (1, 2), *, path: Path | None = None, quick: bool = True, fresh: bool = False
) -> Measured:
    """Read the user's calibration if it covers so many ranks, else measure and keep one.

    Args:
        ranks: numbers of processes that will run.
        path: of the file; by default the user's.
        quick: measure messages and engines less exactly, in about two thirds of the time.
        fresh: measure in any case: on a machine with other work, former figures may be wrong.

    Raises:
        LabError: if a rank cannot measure, or the file cannot be written.
    """
    path = path or default_path()
    try:
        calibration = read_measured(path)
        # A calibration of a GPU says nothing of the cores on which these ranks will run.
        if not fresh and calibration.gpu == "cpu" and {*ranks} <= {setup.ranks for setup in calibration.setups}:
            if wanted(None):
                words = calibration.words(calibration.setups[-1].ranks)
                print(phrase("calibration reused", words=words), file=sys.stderr)
            return calibration
    except LabError:  # there is none, or an old or damaged one
        pass
    sizes = sorted({1, *ranks})
    if wanted(None):
        plural = "" if sizes == [1] else "es"
        print(phrase("measuring", sizes=", ".join(map(str, sizes)), s_1=plural), file=sys.stderr)
    calibration = measure_machine(sizes, quick=quick, device="cpu")
    write_measured(path, calibration)
    return calibration


def measure_rounds(configs: Sequence[RunConfig], rounds: int = 8) -> list[tuple[float, ...]]:
    """Measure the seconds of a step of each layout in every round, on the slowest rank; all run on the same ranks.

    Args:
        configs: layouts with the same number of ranks.
        rounds: steps of each that count, 1 to 1000.

    Returns:
        For each layout its rounds; the n-th rounds of two layouts follow each other, so that their difference is
        paired.

    Raises:
        LabError: without a layout, for different numbers of ranks, or if a rank fails.
    """
    sizes = {config.layout.world_size for config in configs}
    if len(sizes) != 1 or not 1 <= rounds <= MOST_ROUNDS:
        raise phrase.refused(
            "other numbers of ranks or rounds",
            most_rounds=MOST_ROUNDS,
            configs=len(configs),
            sizes=sorted(sizes),
            rounds=rounds,
        )
    answers = spmd(_turns(configs, rounds), sizes.pop(), wall_s=CHOOSING_WALL_S, limit_s=CHOOSING_LIMIT_S)
    failed = first_failure(answers)
    if failed is not None:
        raise phrase.refused("layouts not run", failed_rank=failed[0], reason=failed[1])
    return [tuple(times_s) for times_s in answers[0].value]


def measure_steps(configs: Sequence[RunConfig], rounds: int = 8) -> list[float]:
    """Measure the median seconds of a step of each layout; see `measure_rounds`.

    Raises:
        LabError: as `measure_rounds`.
    """
    return [statistics.median(times_s) for times_s in measure_rounds(configs, rounds)]


def _turns(configs: Sequence[RunConfig], rounds: int) -> Callable[[int, int], list[list[float]]]:
    """Return the function of each rank: the layouts take turns, in alternating order."""

    def run(rank: int, ranks: int) -> list[list[float]]:
        import torch
        import torch.distributed as dist

        from dlojz.train import loop
        from dlojz.train.engines import base

        trainings: list[tuple[Any, Any, int]] = []
        for config in configs:
            engine = base.build(config, loop.build_model(config), torch.device("cpu"))
            # Each rank reads the samples of its place in data and context parallelism.
            batches = loop.open_batches(config, engine.axes.dp_rank, cp_rank=engine.axes.cp_rank)
            trainings.append((engine, batches, config.layout.micro_batches))
        times_s: list[list[float]] = [[] for _ in trainings]
        for number in range(rounds + WARM):
            order = range(len(trainings))
            # Every second round the other way round: a drift of the machine's speed then favours no layout.
            for index in order if number % 2 else reversed(order):
                engine, batches, micro_batches = trainings[index]
                if ranks > 1:
                    # Who: all ranks. What: a barrier. How much: a few bytes.
                    dist.barrier()
                start_s = time.perf_counter()
                # One step: forward and backward of all micro-batches, then the update.
                loop.accumulate(engine, batches, micro_batches, None)
                engine.update()
                took = torch.tensor(time.perf_counter() - start_s, dtype=torch.float64)
                if ranks > 1:
                    # Who: all ranks. What: their seconds, of which the largest count. How much: 8 bytes.
                    dist.all_reduce(took, op=dist.ReduceOp.MAX)
                if number >= WARM:
                    times_s[index].append(float(took))
        return times_s

    return run


KERNELS_OF_A_LAYER: Final = (
    "add", "cast", "gelu", "silu", "sigmoid", "layer norm", "sum of rows", "linear", "linear, of input",
    "linear, of weight", "attention",
)  # fmt: skip
"""Operations of which the shortest kernels' median is what a kernel takes besides its work."""
PRODUCTS_OF_A_LINEAR: Final = ("linear", "linear, of input", "linear, of weight")
LONG_PRODUCT_S: Final = 1e-4
"""Of one product: long against a launch."""
LARGEST_SHARE: Final = 0.9
"""Of a peak that nobody has published, what the best measurement is taken to be: 0.88 to 0.91 on H100 and H200."""


def measured_gpu(measured: Measured) -> Device:
    """Describe the GPU of a calibration as its file does: what was measured, and of a known model what is published.

    Of a GPU that is not known the peaks and the bandwidth follow from the best product and pass, and are said to.

    Raises:
        LabError: if the calibration is of no GPU.
    """
    timings = measured.setup(1).timings
    kernels: dict[tuple[str, str], dict[tuple[int, ...], float]] = {}
    for timing in timings:
        if timing.what == "kernel":
            kernels.setdefault((timing.label, timing.precision), {})[timing.size] = timing.seconds
    products = {precision: rates for precision in PRECISIONS if (rates := _product_rates(kernels, precision))}
    if "bf16" not in products or "fp32" not in products:
        raise phrase.refused("calibration of no GPU", measured=measured)

    clock = _sustained_share(timings, products["bf16"])
    products = {key: {size: clock * rate for size, rate in rates.items()} for key, rates in products.items()}

    def constant(value: float, unit: str, what: str, standing: str = "measured") -> Constant:
        source = f"dlojz calibrate, {measured.processor}, torch {measured.versions.get('torch', '')}: {what}"
        return Constant(float(value), unit, source, measured.date[:10], standing)

    pass_bytes_per_s = statistics.median(
        timing.size[0] / timing.seconds for timing in timings if timing.what == "pass" and timing.label[:3] == "add"
    )
    model = DEVICES.get(measured.gpu)
    if model:
        constants = {key: figure for key, figure in model.constants.items() if not key.startswith("products.")}
    else:
        constants = {
            "memory": constant(measured.memory_bytes, "B", "as torch gives it"),
            "memory_bandwidth": constant(pass_bytes_per_s / LARGEST_SHARE, "B/s", "its passes over 0.9", "derived"),
            "multiprocessors": constant(measured.multiprocessors, "1", "as torch gives them"),
        }
        of_peaks: tuple[tuple[str, Precision], ...] = (("fp32", "fp32"), ("fp16", "bf16"), ("bf16", "bf16"))
        for precision, source in of_peaks:
            peak = max(products[source].values()) / LARGEST_SHARE
            constants[f"peak.{precision}"] = constant(peak, "FLOP/s", f"its best {source} product over 0.9", "derived")
    shortest = [min(kernels[label, "bf16"].values()) for label in KERNELS_OF_A_LAYER if (label, "bf16") in kernels]
    launch_s = statistics.median(timing.seconds for timing in timings if timing.what == "launch")
    constants["kernel_s"] = constant(statistics.median(shortest), "s", "median of the shortest kernels of a layer")
    constants["launch_s"] = constant(launch_s, "s", "operations on next to nothing, with their backward")
    constants["pass_bandwidth"] = constant(pass_bytes_per_s, "B/s", "sums of large tensors")
    tokens: dict[str, int] = {}
    for (label, _), seconds in kernels.items():
        kernel, direction = label.removeprefix("attention, ").removesuffix(", backward"), "backward" in label
        for size in sorted(seconds) if kernel in ATTENTION_KERNELS else ():  # the longest sequence counts
            samples, heads, length, width = size[:4]
            key = f"{kernel}_{'backward' if direction else 'forward'}_{width}"
            flops = FusedAttention(length, length, width, samples * heads, samples * heads).flops(direction)
            tokens[key] = length
            constants[f"attention.{key}"] = constant(
                clock * flops / seconds[size], "FLOP/s", f"causal, {length} tokens, × {clock:.3f}"
            )
    for key, rates in products.items():
        constants[f"products.{key}"] = constant(
            max(rates.values()), "FLOP/s", f"linear layers, × {clock:.3f} after long work"
        )
    name = re.sub(r"[^a-z0-9]+", "-", measured.processor.lower()).strip("-")
    return described(name, measured.processor, constants, model.generation if model else "", tokens, products)


def _product_rates(
    kernels: Mapping[tuple[str, str], Mapping[tuple[int, ...], float]], precision: Precision
) -> dict[tuple[int, ...], float]:
    """Rates of products by size: forward and both gradients of linear layers, the median where a size stands twice."""
    seconds: dict[tuple[int, ...], list[float]] = {}
    for label in PRODUCTS_OF_A_LINEAR:
        for size, product_seconds in kernels.get((label, precision), {}).items():
            seconds.setdefault(size, []).append(product_seconds)
    return {size: 2.0 * math.prod(size) / statistics.median(taken_s) for size, taken_s in sorted(seconds.items())}


def _sustained_share(timings: Sequence[Timed], rates: Mapping[tuple[int, ...], float]) -> float:
    """Rate of large products after much work, as a share of that of a few calls after a pause; 1 at most.

    A GPU at its power limit clocks lower. Where seconds of work were not measured, windows of some 40 ms tell it.
    """
    long = [timing for timing in timings if timing.label == SUSTAINED]
    long = long or [timing for timing in timings if timing.what == "product" and timing.precision == "bf16"
                    and timing.seconds > LONG_PRODUCT_S]  # fmt: skip
    shares = [
        2.0 * math.prod(timing.size[:3]) / timing.seconds / nearest_mean(timing.size[:3], rates) for timing in long
    ]
    return min(1.0, statistics.median(shares)) if shares else 1.0
