"""What `make gpu` measures: one unit for each process, on a GPU or on the CPU that stands in for one.

A unit is a function of the place, the rank and the number of ranks that returns JSON. It runs in a separate process
(`dlojz.processes.forks.spmd`), forked from one that has not touched CUDA, so that an out-of-memory harms no other.
Measurements hold no prediction: a record stays true when a forecast is corrected.

The stand-in is this machine's CPU with tiny models. It goes through every line that needs no CUDA, and its memory is
that of the probe, which the forecast equals but for some bytes.
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d

import dlojz
from dlojz import hardware
from dlojz.base.errors import LabError
from dlojz.base.language import MEBIBYTE, say
from dlojz.base.machine import cores_available, processor_name
from dlojz.config.run_config import RunConfig
from dlojz.hardware import Device
from dlojz.hardware.gpus import HEAD_SIZES, device_of_driver
from dlojz.models.meta import sample_inputs
from dlojz.prediction.allocator import CachingAllocator, replay
from dlojz.prediction.forecast import forecast
from dlojz.results.footprint import Footprint
from dlojz.running.measure import measure_machine
from dlojz.train import loop
from dlojz.train.engines import base
from dlojz.train.probes import TRACED_STEPS, Probes

ROOT: Final = Path(__file__).resolve().parents[1]
GIBIBYTE: Final = 2**30
CAP_BYTES: Final = {False: 16 * GIBIBYTE, True: 32 * MEBIBYTE}
"""Limit of memory while the largest batch is looked for: on every GPU the same, and that of the stand-in."""
CLEAN_STEPS: Final = 2
TIMED_STEPS: Final = 12
TIMED_S: Final = 1.0
"""Seconds after which three timed steps are enough."""
MOST_BATCH: Final = 2**13

JSON = Any


@dataclass(frozen=True)
class Place:
    """Where is measured.

    Args:
        gpu: the driver's name, or the processor's of a stand-in.
        memory_bytes: of the GPU, as CUDA gives it, or of the machine.
        versions: of torch, CUDA, cuDNN, Python and dlojz, and of the GPU's instructions (`capability`).
        stand_in: whether the CPU stands in for a GPU.
    """

    gpu: str
    memory_bytes: int
    versions: dict[str, str]
    stand_in: bool = False

    @property
    def slug(self) -> str:
        """Name of the folder of its records, e.g. `gpu-nvidia-h100-80gb-hbm3`."""
        name = "stand-in" if self.stand_in else re.sub(r"[^a-z0-9]+", "-", self.gpu.lower()).strip("-")
        return f"gpu-{name}"

    @property
    def torch_device(self) -> torch.device:
        """The device of every rank: they share one GPU."""
        return torch.device("cpu") if self.stand_in else torch.device("cuda", 0)

    @property
    def device(self) -> Device | None:
        """The GPU as the forecast takes it, with the memory that it really has; None for the CPU.

        One that `dlojz.hardware` does not list is taken as an A100, or as an H100 from Hopper on: what the forecast
        reads besides the memory is cuBLAS's workspace, which has two sizes.
        """
        if self.stand_in:
            return None
        like = "h100" if float(self.versions.get("capability", 0)) >= 9 else "a100-80"
        found = device_of_driver(self.gpu) or hardware.device(like)
        return replace(found, title_en=self.gpu, memory_bytes=self.memory_bytes)


Work = Callable[[Place, int, int], JSON]


@dataclass(frozen=True)
class Unit:
    """Unit of work, with one record.

    Args:
        part: `tests`, `memory`, `batch`, `time`, `forms`, `ranks` or `replays`.
        name: unique within its part; with it the name of the record's file.
        work: called on every rank; what rank 0 returns is recorded.
        seconds: expected, at most: it is not begun when less time is left.
        limit_s: after which it is stopped and recorded as failed.
        ranks: processes.
        config: what is trained, where the table compares with a prediction.
    """

    part: str
    name: str
    work: Work
    seconds: float = 8.0
    limit_s: float = 60.0
    ranks: int = 1
    config: RunConfig | None = None

    @property
    def id(self) -> str:
        """`part-name`."""
        return f"{self.part}-{self.name}"


class NoGpuError(Exception):
    """There is no GPU that torch can use; the text is a sentence that says why."""


def look() -> dict[str, JSON]:
    """Look at the GPU, in a process that may initialise CUDA; what `Place` takes, or `why` there is none."""
    if torch.version.cuda is None:
        version = torch.__version__
        return {"why": say(en=f"torch {version} is built without CUDA", fr=f"torch {version} est sans CUDA")}
    if not torch.cuda.is_available():
        version = f"torch {torch.__version__} (CUDA {torch.version.cuda})"
        return {"why": say(en=f"{version} finds no GPU", fr=f"{version} ne trouve pas de GPU")}
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "memory_bytes": torch.cuda.mem_get_info(0)[1],
        "versions": versions()
        | {
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
            "capability": f"{properties.major}.{properties.minor}",
        },
    }


def stand_in() -> Place:
    """This machine's CPU in the place of a GPU."""
    return Place(processor_name(), 2 * GIBIBYTE, versions(), stand_in=True)


def versions() -> dict[str, str]:
    """Versions that a record is valid for."""
    return {"python": platform.python_version(), "torch": torch.__version__, "dlojz": dlojz.__version__}


# ---- memory and seconds of steps


@contextmanager
def without_random_values() -> Iterator[None]:
    """Skip the random initial values of matrices, which take a processor seconds for a model of 500 M parameters."""

    def skipping(fill: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda tensor, *args, **kwargs: tensor if tensor.dim() > 1 else fill(tensor, *args, **kwargs)

    names = ("normal_", "uniform_", "trunc_normal_", "xavier_normal_", "xavier_uniform_", "kaiming_normal_",
             "kaiming_uniform_")  # fmt: skip
    with mock.patch.multiple(nn.init, **{name: skipping(getattr(nn.init, name)) for name in names}):
        yield


def built(config: RunConfig, device: torch.device) -> base.Engine:
    """Build a run's engine on the device, its matrices filled there."""
    with without_random_values():
        model = loop.build_model(config)
    engine = base.build(config, model, device)
    with torch.no_grad():
        for parameter in engine.model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02)
    return engine


def batch_of(config: RunConfig, samples: int) -> tuple[Tensor, Tensor]:
    """Make a random micro-batch on the CPU, its shapes and types those of the run's data."""
    inputs = sample_inputs(
        config.model, samples, image_size=config.image_size, sequence_length=config.sequence_length, device="cpu"
    )
    if inputs.is_floating_point():
        return inputs.normal_(), torch.randint(config.num_classes, (samples,))
    return inputs.random_(config.num_classes), torch.randint(config.num_classes, tuple(inputs.shape))


def copies_of(batch: tuple[Tensor, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Copy a micro-batch endlessly, as a loader makes new tensors for each."""
    while True:
        yield batch[0].clone(), batch[1].clone()


def step(config: RunConfig, place: Place, rank: int, size: int) -> JSON:
    """Train some steps: memory by category as the probe sees it, the allocator's peaks, and the seconds of a step."""
    del rank, size
    try:
        return _step(config, place)
    except torch.cuda.OutOfMemoryError as error:
        return {"out_of_memory": str(error).splitlines()[0][:300]}


def _step(config: RunConfig, place: Place) -> dict[str, JSON]:
    device = place.torch_device
    torch.set_num_threads(1 if place.stand_in else min(8, cores_available()))
    batch = batch_of(config, config.layout.micro_batch)
    samples = copies_of(batch)
    probes = Probes(config, 0, device)
    probes.start()
    try:
        engine = built(config, device)
        probes.attach(engine)
        for number in range(TRACED_STEPS):
            probes.start_step(number)
            loop.accumulate(engine, samples, config.layout.micro_batches, probes)
            engine.update()
            probes.end_step()
    finally:
        probes.close()
    footprint = probes.footprint(0)
    assert isinstance(footprint, Footprint)
    probes.clock.detach(engine)
    found: dict[str, JSON] = {"traced": footprint.memory.to_dict(), "allocator": None}
    if device.type == "cuda":
        found["allocator"] = _allocated(lambda: _train(engine, samples, CLEAN_STEPS))
    on_device = itertools.repeat(tuple(tensor.to(device) for tensor in batch))
    found["step_s"] = _timed(lambda: _train(engine, on_device, 1), device)
    return found


def _train(engine: base.Engine, samples: Iterator[Any], steps: int) -> None:
    for _ in range(steps):
        loop.accumulate(engine, samples, engine.config.layout.micro_batches, None)
        engine.update()


def _allocated(train: Callable[[], None]) -> dict[str, int]:
    """The allocator's peaks while it trains, in bytes, and what CUDA itself has taken besides.

    Source: torch 2.13, `torch/cuda/memory.py`.
    """
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    train()
    torch.cuda.synchronize()
    told = torch.cuda.memory_stats()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "requested_bytes": told["requested_bytes.all.peak"],
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "retries": told["num_alloc_retries"],
        "context_bytes": total_bytes - free_bytes - torch.cuda.memory_reserved(),
    }


def _timed(call: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Median, least and greatest seconds of a call that has been warmed up; the median until it returned, `issued`."""
    taken: list[float] = []
    issued: list[float] = []
    for number in range(TIMED_STEPS + 1):
        start_s = time.perf_counter()
        call()
        issued_s = time.perf_counter() - start_s
        if device.type == "cuda":
            torch.cuda.synchronize()
        if number:
            taken.append(time.perf_counter() - start_s)
            issued.append(issued_s)
        if len(taken) >= 3 and sum(taken) > TIMED_S:
            break
    told = {"median": statistics.median(taken), "least": min(taken), "greatest": max(taken), "steps": len(taken)}
    return told | {"issued": statistics.median(issued)}


def largest(fits: Callable[[int], bool], most: int = MOST_BATCH) -> int:
    """Find the largest batch that fits, to 1 in 64; 0 where not even one sample does.

    Args:
        fits: true up to some batch, false from there on.
        most: beyond which nothing is tried.
    """
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
        if high > most:
            return low
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def with_batch(config: RunConfig, samples: int) -> RunConfig:
    """The same run with another micro-batch."""
    return RunConfig.of(**{**config.to_dict(), "layout": config.layout, "micro_batch": samples})


def largest_batch(config: RunConfig, place: Place, rank: int, size: int) -> JSON:
    """Find the largest micro-batch that trains under a limit of memory, by trying."""
    cap_bytes = CAP_BYTES[place.stand_in]
    tried: dict[int, bool] = {}
    if place.stand_in:

        def fits(samples: int) -> bool:
            told = step(with_batch(config, samples), place, rank, size)
            return bool(told["traced"]["peak_bytes"] <= cap_bytes)

    else:
        torch.cuda.set_per_process_memory_fraction(cap_bytes / place.memory_bytes)
        engine = built(config, place.torch_device)

        def fits(samples: int) -> bool:
            return _trains(engine, config, samples)

    def noted(samples: int) -> bool:
        tried[samples] = fits(samples)
        return tried[samples]

    return {"cap_bytes": cap_bytes, "batch": largest(noted), "tried": {str(one): tried[one] for one in sorted(tried)}}


def _trains(engine: base.Engine, config: RunConfig, samples: int) -> bool:
    """Whether two steps of a batch fit; afterwards the GPU holds the states alone."""
    try:
        _train(engine, copies_of(batch_of(config, samples)), CLEAN_STEPS)
        torch.cuda.synchronize()
        fitted = True
    except torch.cuda.OutOfMemoryError:
        fitted = False
    engine.optimizer.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()
    return fitted


# ---- what the package predicts of them


def predict(unit: Unit, place: Place) -> dict[str, JSON] | None:
    """Predict what a unit of memory or of the largest batch measures; None for the others.

    Raises:
        LabError: if the run cannot be predicted.
    """
    if unit.config is None or unit.part not in ("memory", "batch"):
        return None
    if unit.part == "memory":
        return predicted_bytes(unit.config, place.device)
    config, cap_bytes = unit.config, CAP_BYTES[place.stand_in]

    def fits(samples: int) -> bool:
        told = forecast(with_batch(config, samples), device=place.device)
        if place.device is None:
            return (told.memory.peak_bytes or 0) <= cap_bytes
        return replay(told.events, CachingAllocator(limit_bytes=cap_bytes)).out_of_memory_event is None

    return {"batch": largest(fits)}


def predicted_bytes(config: RunConfig, device: Device | None) -> dict[str, JSON]:
    """Forecast the peaks that the probe and the allocator measure, in bytes."""
    told = forecast(config, device=device)
    handles = 0 if device is None else 2 * device.cublas_workspace_bytes
    found: dict[str, JSON] = {"peak_bytes": told.memory.peak_bytes, "cublas_bytes": handles}
    if device is not None:
        replayed = replay(told.events)
        found |= {
            "requested_bytes": replayed.requested_peak_bytes,
            "allocated_bytes": replayed.allocated_peak_bytes,
            "reserved_bytes": replayed.reserved_peak_bytes,
            "context_bytes": device.context_bytes,
        }
    return found


# ---- tests, calibration, kernels


def marked_tests() -> list[str]:
    """Files with tests that are marked `gpu`, from the root."""
    return sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if "@pytest.mark.gpu" in path.read_text(encoding="utf-8")
    )


def tests(place: Place, rank: int, size: int) -> JSON:
    """Run the tests that are marked `gpu`."""
    del rank, size
    files = marked_tests()
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()] or [""]
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", lines[-1])}
    if done.returncode or not (counts.get("passed") or place.stand_in):
        raise RuntimeError(f"pytest: {' / '.join(lines[-3:])[-400:]}")
    return {"files": files, **counts}


def calibration(place: Place, rank: int, size: int) -> JSON:
    """Calibrate as `dlojz calibrate` does, with one rank; the content of its file."""
    del rank, size
    dist.destroy_process_group()  # of gloo: it would be taken for a machine without a GPU
    return measure_machine((1,), quick=place.stand_in, device="cpu" if place.stand_in else "cuda").to_dict()


ATTENTION: Final = {False: ((4, 16, 4096), (1, 16, 16384)), True: ((1, 2, 128),)}
"""Samples, heads and tokens of a fused attention; the second of the stand-in."""


def attention(place: Place, rank: int, size: int) -> JSON:
    """Time fused attention by kernel, pass, size of head and mask; rates in FLOP/s.

    4·b·a·s²·h operations forward, half of them with a causal mask, 2.5 times as many backward. Source: Dao 2023,
    "FlashAttention-2" (arXiv 2307.08691), §4.1.
    """
    del rank, size
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels = [SDPBackend.MATH] if place.stand_in else [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    rows = []
    for (samples, heads, tokens), head, causal, kernel in itertools.product(
        ATTENTION[place.stand_in], HEAD_SIZES, (False, True), kernels
    ):
        shape = (samples, heads, tokens, head)
        query, key, value = (
            torch.randn(shape, device=place.torch_device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        )
        flops = 4 * samples * heads * tokens**2 * head / (2 if causal else 1)
        row: dict[str, JSON] = {"kernel": kernel.name, "tokens": tokens, "head": head, "causal": causal}
        try:
            with sdpa_kernel(kernel):
                attend = partial(nn.functional.scaled_dot_product_attention, query, key, value, is_causal=causal)
                forward_s = _timed(attend, place.torch_device)["median"]
                answer = attend()
                gradient = torch.randn_like(answer)
                backward_s = _timed(
                    lambda: torch.autograd.grad(answer, (query, key, value), gradient, retain_graph=True),  # noqa: B023
                    place.torch_device,
                )["median"]
            row |= {"forward_flops": flops / forward_s, "backward_flops": 2.5 * flops / backward_s}
        except RuntimeError as error:  # this GPU or this version has no such kernel
            row["why"] = str(error).splitlines()[0][:200]
        rows.append(row)
    return rows


PROFILED: Final = (
    ("vit_b_16", "fp32", "none", 32), ("vit_b_16", "bf16", "none", 32), ("vit_b_16", "bf16", "full", 32),
    ("vit_b_16", "bf16", "selective", 32), ("vit_l_16", "bf16", "none", 16), ("gpt2", "fp32", "none", 4),
    ("gpt2", "bf16", "none", 4), ("coatnet_0", "fp32", "none", 32), ("coatnet_0", "bf16", "none", 32),
    ("coatnet_3", "bf16", "none", 8), ("coatnet_5", "fp32", "none", 1), ("coatnet_5", "bf16", "none", 1),
)  # fmt: skip
"""Steps whose operators are timed one by one: model, precision, checkpointing, micro-batch."""
PROFILED_STEPS: Final = 2


def profile(place: Place, rank: int, size: int) -> JSON:
    """Record which operators a step's seconds go to, on the GPU and on its host, by torch's profiler: it tells where a
    wrong prediction is wrong, and none is made from it."""
    del rank, size
    device = place.torch_device
    torch.set_num_threads(1 if place.stand_in else min(8, cores_available()))
    found = []
    for model, precision, kept, samples in (("vit_tiny", "fp32", "none", 2),) if place.stand_in else PROFILED:
        config = RunConfig.of(model=model, precision=precision, checkpointing=kept, micro_batch=samples,
                              data="synthetic", device=device.type)  # fmt: skip
        engine = built(config, device)
        batch = itertools.repeat(tuple(one.to(device) for one in batch_of(config, samples)))
        step_s = _timed(partial(_train, engine, batch, 1), device)
        with torch.profiler.profile() as profiler:
            _train(engine, batch, PROFILED_STEPS)
            if device.type == "cuda":
                torch.cuda.synchronize()
        rows = [
            [one.key[:90], one.count / PROFILED_STEPS, one.self_device_time_total / 1e6 / PROFILED_STEPS,
             one.self_cpu_time_total / 1e6 / PROFILED_STEPS]
            for one in profiler.key_averages()
        ]  # fmt: skip
        rows.sort(key=lambda row: -max(row[2:]))
        found.append({"run": [model, precision, kept, samples], "step_s": step_s, "operators": rows[:90]})
        del engine
        gc.collect()
    return found


# ---- forms: INT8, 2:4, fp8, torch.compile, updates


FP8_SIZES: Final = {False: (2048, 4096, 8192), True: (64,)}


def fp8(place: Place, rank: int, size: int) -> JSON:
    """Time square products in fp8 (e4m3, one scale a tensor) beside bf16, in FLOP/s, with the cast.

    Source: torch 2.13, `aten/src/ATen/native/cuda/ScaledBlas.cpp`: `_scaled_mm` takes the second matrix by columns.
    """
    del rank, size
    device = place.torch_device
    rows = []
    for width in FP8_SIZES[place.stand_in]:
        left, right = (torch.randn(width, width, device=device, dtype=torch.bfloat16) for _ in range(2))
        narrow, columns = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()
        one = torch.ones((), device=device)
        forms: dict[str, Callable[[], object]] = {
            "bf16": partial(torch.mm, left, right),
            "fp8": partial(torch._scaled_mm, narrow, columns, one, one, out_dtype=torch.bfloat16),
            "cast": lambda left=left: (left / left.abs().amax()).to(torch.float8_e4m3fn),
        }
        for form, call in forms.items():
            seconds = _timed(partial(_repeated, call, 16), device)["median"] / 16
            rows.append({"form": form, "width": width, "seconds": seconds, "flops": 2 * width**3 / seconds})
    return rows


def _repeated(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        call()


def compiled(config: RunConfig, place: Place, rank: int, size: int) -> JSON:
    """Time a step as it is and through torch.compile, with the allocator's peaks of both."""
    del rank, size
    device, found = place.torch_device, {}
    batch = itertools.repeat(tuple(one.to(device) for one in batch_of(config, config.layout.micro_batch)))
    for form in ("eager", "compiled"):
        torch.manual_seed(0)
        engine = built(config, device)
        if form == "compiled":
            engine.model = torch.compile(engine.model, backend="eager" if place.stand_in else "inductor")
        start_s = time.perf_counter()
        _train(engine, batch, 2)
        first_s = time.perf_counter() - start_s
        peaks = None if place.stand_in else _allocated(partial(_train, engine, batch, CLEAN_STEPS))
        found[form] = {
            "first_s": first_s,
            "step_s": _timed(partial(_train, engine, batch, 1), device)["median"],
            "allocator": peaks,
        }
        del engine
        gc.collect()
        torch._dynamo.reset()
        if not place.stand_in:
            torch.cuda.empty_cache()
    return found


def update_forms(config: RunConfig, place: Place, rank: int, size: int) -> JSON:
    """Time the forms of the update in turns, as `update_forms` does."""
    del rank, size
    from benchmarks.update_forms import measure_forms

    return [asdict(one) for one in measure_forms(config, rounds=3 if place.stand_in else 15)]


# ---- several ranks on one GPU


def messages_through_host() -> None:
    """Send and receive a GPU's tensors through host memory, since gloo sends from there alone."""
    send, recv, isend, irecv = (getattr(distributed_c10d, name) for name in ("send", "recv", "isend", "irecv"))

    class Received:
        def __init__(self, work: Any, host: Tensor, tensor: Tensor) -> None:
            self.work, self.host, self.tensor = work, host, tensor

        def wait(self, *args: Any) -> bool:
            self.work.wait(*args)
            self.tensor.copy_(self.host)
            return True

        def is_completed(self) -> bool:
            return bool(self.work.is_completed())

    def sent(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda tensor, *args, **kwargs: call(tensor.detach().cpu(), *args, **kwargs)

    def received(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        host = torch.empty_like(tensor, device="cpu")
        source = recv(host, *args, **kwargs)
        tensor.detach().copy_(host)
        return source

    def received_later(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        host = torch.empty_like(tensor, device="cpu")
        return Received(irecv(host, *args, **kwargs), host, tensor.detach())

    changed = {"send": sent(send), "isend": sent(isend), "recv": received, "irecv": received_later}
    for name, call in changed.items():
        setattr(distributed_c10d, name, call)
        setattr(dist, name, call)


PARITY_STEPS: Final = 4


def train_ranks(config: RunConfig, place: Place, rank: int, size: int) -> JSON:
    """Train on ranks that share the GPU: the losses of the whole batch, which must be those of one process."""
    device = place.torch_device
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.allow_tf32 = False  # another shape may take another algorithm, but not another precision
        if size > 1:
            messages_through_host()
    engine = base.build(config, loop.build_model(config), device)
    batches = loop.open_batches(config, engine.axes.dp_rank)
    control = dist.group.WORLD if size > 1 else None
    losses = []
    start_s = time.perf_counter()
    for _ in range(PARITY_STEPS):
        mean = loop.accumulate(engine, batches, config.layout.micro_batches, None)
        losses.append(loop.agree(mean.cpu(), False, control)[0])
        engine.update()
    took_s = time.perf_counter() - start_s
    squares = sum(float(weight.double().square().sum()) for _, weight in engine.weights())
    peak_bytes = None if place.stand_in else torch.cuda.max_memory_allocated()
    del rank
    return {"losses": losses, "weights_norm": math.sqrt(squares), "seconds": took_s, "allocated_bytes": peak_bytes}


def replayable(config: RunConfig, place: Place, rank: int, size: int) -> JSON:
    """Really run a configuration, and keep its record as `make_replays` ships one."""
    del rank, size
    from benchmarks.make_replays import trimmed

    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    worker = {} if place.stand_in else {"worker_module": "benchmarks.gpu_rank"}
    with tempfile.TemporaryDirectory(prefix="dlojz-gpu-") as root:
        made = dlojz.run(config, on="local", root=root, progress=False, time_limit_s=90, **worker)
        record = made.record
        if made.state != "completed" or record is None:
            raise RuntimeError(f"{config.title}: {made.state}. {record.reason if record else ''}")
        return trimmed(record).to_dict()


# ---- all units


def _memory_configs(stand_in: bool) -> dict[str, RunConfig]:
    """Single-GPU steps by name: every model in both precisions, and recomputed in bf16; then forms on some of them."""
    sizes: dict[str, dict[str, Any]] = {
        "coatnet_0": {"micro_batch": 32},
        "coatnet_1": {"micro_batch": 16},
        "coatnet_2": {"micro_batch": 16},
        "coatnet_3": {"micro_batch": 8},
        "coatnet_4": {"micro_batch": 4},
        "coatnet_5": {"micro_batch": 1},
        "vit_s_16": {"micro_batch": 64},
        "vit_b_16": {"micro_batch": 32},
        "vit_l_16": {"micro_batch": 16},
        "gpt2": {"micro_batch": 4},
        "gpt2_medium": {"micro_batch": 2},
        # AdamW in a single pass would hold 16 bytes of states and temporaries of 4 for each of 1.1 G parameters.
        "tinyllama_1b": {"micro_batch": 1, "sequence_length": 1024, "update": "in_backward"},
    }
    on: tuple[str, ...] = ("coatnet_0", "vit_b_16", "gpt2")
    if stand_in:
        sizes = {"coatnet_tiny": {"micro_batch": 4}, "gpt_tiny": {"micro_batch": 2}}
        on = ("gpt_tiny",)
    bases = {
        name: {"model": name, "data": "synthetic", "device": "cpu" if stand_in else "cuda", **fields}
        for name, fields in sizes.items()
    }
    asked: list[dict[str, Any]] = [
        {**fields, "precision": precision, "checkpointing": kept}
        for kept, precision in (("none", "bf16"), ("none", "fp32"), ("full", "bf16"))
        for fields in bases.values()
    ]
    for name in on:
        narrow = {**bases[name], "precision": "bf16"}
        asked += [{**narrow, "checkpointing": kept} for kept in ("selective", "every_second")]
        asked.append({**narrow, "micro_batches": 2})
        light = {**narrow, "micro_batch": 1}  # so that the peak is the update's
        updates = ("for_loop", "foreach", "fused", "in_backward", "in_forward")
        asked += [{**light, "update": form} for form in updates]
        asked += [{**light, "optimizer": optimizer} for optimizer in ("momentum", "sgd")]
    found: dict[str, RunConfig] = {}
    for fields in asked:
        try:
            config = RunConfig.of(**fields)
        except LabError:  # a model whose blocks have no such form
            continue
        forms = (fields.get(key, "none") for key in ("checkpointing", "update", "optimizer"))
        words = [config.model, config.precision, *(form for form in forms if form != "none")]
        found["-".join([*words, *(["accumulated"] if "micro_batches" in fields else [])])] = config
    return found


def _rank_configs(stand_in: bool) -> dict[str, RunConfig]:
    """Layouts of two ranks with the one process that each must equal, named after it up to the first hyphen."""
    device = {"device": "cpu" if stand_in else "cuda", "data": "synthetic", "steps": PARITY_STEPS}
    # No CoAtNet: its BatchNorm sees each replica's own samples.
    split = {"model": "vit_tiny", "image_size": 32, "micro_batch": 4, **device}
    text = {"model": "llama_tiny", "micro_batch": 4, **device}
    asked = {
        "data-one": {**split, "micro_batches": 2},
        "data-ddp": {**split, "dp": 2},
        "data-fsdp2": {**split, "dp": 2, "zero": 3},
        "data-zero2": {**split, "dp": 2, "zero": 2},
        **{f"data-by-hand-zero{stage}": {**split, "dp": 2, "zero": stage, "engine": "by_hand"} for stage in (0, 3)},
        "pipeline-one": {**split, "micro_batches": 4},
        "pipeline-by-hand": {**split, "pp": 2, "micro_batches": 4, "engine": "by_hand", "schedule": "1f1b"},
        "pipeline-torch": {**split, "pp": 2, "micro_batches": 4, "schedule": "1f1b"},
        "tensor-one": text,
        "tensor-by-hand": {**text, "tp": 2, "engine": "by_hand"},
        "tensor-torch": {**text, "tp": 2},
    }
    return {name: RunConfig.of(**fields) for name, fields in asked.items()}


def _replay_configs(stand_in: bool) -> dict[str, RunConfig]:
    """Runs of labs 02, 04, 06 and 11 at full size, for `on="replay"`."""
    device = {"device": "cpu" if stand_in else "cuda", "data": "synthetic", "steps": 6}
    memory: dict[str, Any] = {"model": "coatnet_0", "micro_batch": 32, "precision": "bf16", **device}
    zero: dict[str, Any] = {"model": "coatnet_0", "micro_batch": 8, "dp": 2, **device}
    tensor: dict[str, Any] = {"model": "gpt2", "micro_batch": 2, "engine": "by_hand", **device}
    teacher: dict[str, Any] = {"model": "vit_s_16", "micro_batch": 64, "precision": "bf16", **device}
    if stand_in:
        memory = zero = tensor = teacher = {"model": "vit_tiny", "image_size": 32, "micro_batch": 4, **device}
        return {"lab02-none": RunConfig.of(**memory)}
    asked = {
        **{f"lab02-{kept}": {**memory, "checkpointing": kept} for kept in ("none", "full")},
        **{f"lab04-zero{stage}": {**zero, "zero": stage, "engine": "by_hand"} for stage in range(4)},
        "lab06-one": tensor,
        "lab06-tp2": {**tensor, "tp": 2},
        "lab11-teacher": teacher,
    }
    return {name: RunConfig.of(**fields) for name, fields in asked.items()}


def units(stand_in: bool) -> list[Unit]:
    """All units, in the order in which they are done: first what the others are compared with."""
    device = "cpu" if stand_in else "cuda"
    found = [
        Unit("time", "calibration", calibration, seconds=60, limit_s=180),
        Unit("time", "attention", attention, seconds=15, limit_s=60),
        Unit("time", "profile", profile, seconds=40, limit_s=120),
        Unit("tests", "pytest", tests, seconds=30, limit_s=110),
    ]
    found += [
        Unit("memory", name, partial(step, config), config=config) for name, config in _memory_configs(stand_in).items()
    ]
    found += [
        Unit("ranks", name, partial(train_ranks, config), 10, 60, config.layout.world_size, config)
        for name, config in _rank_configs(stand_in).items()
    ]
    searched: dict[str, dict[str, Any]] = {
        "coatnet_0-bf16": {"model": "coatnet_0", "precision": "bf16"},
        "coatnet_2-fp32": {"model": "coatnet_2"},
        "vit_b_16-bf16": {"model": "vit_b_16", "precision": "bf16"},
        "gpt2-bf16-full": {"model": "gpt2", "precision": "bf16", "checkpointing": "full"},
    }
    if stand_in:
        searched = {"gpt_tiny-fp32": {"model": "gpt_tiny"}}
    for name, fields in searched.items():
        config = RunConfig.of(**fields, data="synthetic", device=device, micro_batch=1)
        found.append(Unit("batch", name, partial(largest_batch, config), 20, 90, config=config))
    small = {"data": "synthetic", "device": device, "learning_rate": 1e-5}
    whole = ("vit_tiny",) if stand_in else ("vit_b_16", "gpt2")
    forms = ("vit_tiny",) if stand_in else ("coatnet_0", "gpt2")
    found += [
        Unit("forms", "fp8", fp8, 10, 60),
    ]
    for model in whole:
        config = RunConfig.of(model=model, micro_batch=4, precision="bf16", **small)
        found.append(Unit("forms", f"compile-{model}", partial(compiled, config), 40, 120))
    for model in forms:
        config = RunConfig.of(model=model, micro_batch=4, **small)
        found.append(Unit("forms", f"update-{model}", partial(update_forms, config), 15, 60))
    found += [
        Unit("replays", name, partial(replayable, config), 20, 110, config=config)
        for name, config in _replay_configs(stand_in).items()
    ]
    return found
