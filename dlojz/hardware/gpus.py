"""GPUs: memory and what a process takes of it, peak speeds, bandwidth, power; one file each, and one for the CPU.

A peak that a GPU does not have is absent, never zero; peaks are those of dense matrices (without structured sparsity),
per second, decimal.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final, Literal, get_args

from dlojz.base.errors import LabError
from dlojz.base.language import MEBIBYTE, format_bytes, one_of, say, size_bytes
from dlojz.hardware.constants import (
    Constant,
    ConstantsFile,
    constant_line,
    file_of,
    file_sentence,
    own_files,
    title_words,
    toml_text,
    write_hardware,
)

NCCL_BYTES: Final = 1536 * MEBIBYTE
"""Approximate: 1.5 GiB more after the first collective of a process (communicators, their buffers and kernels).

Source: Bekman, "Machine Learning Engineering", training/performance, "Anatomy of Model's Memory Usage".
"""
Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]
PRECISIONS: Final = get_args(Precision)
FOLDER: Final = Path(__file__).with_name("data") / "gpus"
CPU: Final = "cpu"
_FILES: Final = {path.stem: path for path in (*FOLDER.glob("*.toml"), FOLDER.with_name(f"{CPU}.toml"))}
GPUS: Final = tuple(sorted(_FILES))
"""Names of all GPUs, those of `DEVICES`, and `cpu` for a process without one."""
_SCALARS: Final = {"memory": "B", "memory_bandwidth": "B/s", "multiprocessors": "1"}
"""Constants of a file besides the peaks, with their units."""
_POWER: Final = {"thermal_design_power": "W", "idle_power": "W"}
_OF_CUDA: Final = {"cublas_workspace": "B", "context": "B"}
"""The same, of GPUs alone."""
MEASURED: Final = {"kernel_s": "s", "launch_s": "s", "pass_bandwidth": "B/s"}
"""The same, which are measured."""
CLASS_DEFAULTS: Final = {
    "context": 804_257_792.0, "cublas_workspace": 33_554_432.0, "thermal_design_power": 700.0, "idle_power": 70.0,
    "kernel_s": 3.1e-6,
}  # fmt: skip
"""What stands in for a constant that a GPU's file leaves out, and that is said: an H100's, whose context and workspace
are the most of all that are known; a kernel as measured on it (3.15 µs) and an H200 (3.06)."""
_LONGEST_S: Final = {"kernel_s": 1e-3, "launch_s": 60e-6}
"""Beyond which these are no time of one kernel or launch."""
AttentionKernel = Literal["flash2", "flash1", "flash3", "cudnn"]
ATTENTION_KERNELS: Final = get_args(AttentionKernel)
"""Generations of fused attention: FlashAttention-2 (what torch's `scaled_dot_product_attention` runs), FlashAttention
and its first kernel in Triton, FlashAttention-3, cuDNN's."""
HEAD_SIZES: Final = (64, 128)
"""Sizes of a head for which the rates of fused attention are published."""
HALF_SPEED_ROWS: Final = 256
"""Rows and columns of scores at which fused attention reaches half its rate: blocks on the diagonal are computed whole,
and few rows fill few multiprocessors.

Source: FlashAttention-3 (arXiv 2407.08608), figures 5 and 6: of the rate at 16 384 tokens, 57 to 67 % at 512, 78 to
81 % at 1024, 89 to 90 % at 2048, 95 to 96 % at 4096 (FlashAttention-2, heads of 128).
"""
_ATTENTION: Final = tuple(
    f"{kernel}_{direction}_{size}"
    for kernel in ATTENTION_KERNELS
    for direction in ("forward", "backward")
    for size in HEAD_SIZES
)


@dataclass(frozen=True)
class Device:
    """Memory, speed and power of a GPU model, or of the CPU.

    Args:
        name: as it is asked for, e.g. `v100-32`.
        title_en: as it is shown in English, e.g. `V100 32 GB`.
        memory_bytes: in all, as a process sees it (`torch.cuda.mem_get_info`), which is less than what is sold.
        context_bytes: for the CUDA context of one process; it depends on driver and CUDA version.
        nccl_bytes: for NCCL, in a process that has communicated, approximate.
        cublas_workspace_bytes: for each cuBLAS handle and stream, by default; from the allocator, so part of what
            is reserved. A training process has two handles: one of forward's thread, one of backward's.
        peak_flops: dense peak of the matrix units by precision, in FLOP/s; absent where there is none.
        memory_bytes_per_s: bandwidth of its memory.
        num_sms: multiprocessors, over which the tiles of a product are distributed.
        tdp_w: thermal design power.
        idle_w: power without work.
        kernel_s: seconds that a kernel occupies the GPU besides its work: the shortest one of an operation; 0 on a CPU,
            whose operations are measured with it.
        attention_flops: rate of fused attention at long sequences in FLOP/s, by kernel, pass and head size
            (`flash2_forward_128`); absent where nobody has published it.
        constants: each figure with its source.
        family: generation whose calibration holds for what the file does not say; else that of the name.
        attention_tokens: of the sequence at which a rate of fused attention was measured, where the file says it.
        product_flops: measured rate of products in FLOP/s, by precision and by rows, columns and inner size.
        pass_bytes_per_s: bytes read and written per second by a pass over a large tensor; None where not measured.
        launch_s: seconds that the host needs for one kernel with what is around it; None where not measured.
        left_out: constants that its file does not have, for which those of the class stand in.
    """

    name: str
    title_en: str
    memory_bytes: int
    context_bytes: int
    nccl_bytes: int
    cublas_workspace_bytes: int
    peak_flops: Mapping[Precision, float] = field(default_factory=dict, hash=False)
    # Not known: times that are computed from it are NaN.
    memory_bytes_per_s: float = math.nan
    num_sms: int = 0
    tdp_w: float = math.nan
    idle_w: float = math.nan
    kernel_s: float = math.nan
    attention_flops: Mapping[str, float] = field(default_factory=dict, hash=False)
    constants: Mapping[str, Constant] = field(default_factory=dict, hash=False)
    family: str = ""
    attention_tokens: Mapping[str, int] = field(default_factory=dict, hash=False)
    product_flops: Mapping[Precision, Mapping[tuple[int, ...], float]] = field(default_factory=dict, hash=False)
    pass_bytes_per_s: float | None = None
    launch_s: float | None = None
    left_out: tuple[str, ...] = ()

    @property
    def default_words(self) -> str:
        """Say that a class's memory of a process stands in for a measured one; empty where none does."""
        if not (names := ", ".join(key for key in self.left_out if key in _OF_CUDA)):
            return ""
        return say(
            en=f"Class defaults: {names} of {self.title} were not measured; the most of all known GPUs stands in.",
            fr=f"Valeurs par défaut : {names} de {self.title} ne sont pas mesurés ; le plus de tous les GPU connus les "
            "remplace.",
        )

    def allocatable_bytes(self, processes: int = 1) -> int:
        """Bytes that the allocator of each of so many processes, one per GPU, can reserve; with NCCL from two on.

        Args:
            processes: at least 1.
        """
        # A single process makes no communicator.
        return self.memory_bytes - self.context_bytes - (self.nccl_bytes if processes > 1 else 0)

    def attention_rates(self, kernel_and_pass: str) -> tuple[float | None, float | None]:
        """Rates of a fused attention at long sequences for heads of 64 and of 128, in FLOP/s; None where unknown.

        A file that gives one size of head alone speaks for both. A rate that was measured at so many tokens is raised
        to that at long sequences by `HALF_SPEED_ROWS`.

        Args:
            kernel_and_pass: such as `flash2_forward`.
        """
        rates: list[float | None] = []
        for size in HEAD_SIZES:
            key = f"{kernel_and_pass}_{size}"
            rate, tokens = self.attention_flops.get(key), self.attention_tokens.get(key, math.inf)
            rates.append(rate and rate * (1 + HALF_SPEED_ROWS / tokens))
        small, large = rates
        return small or large, large or small

    @property
    def generation(self) -> str:
        """Generation: that which its file names, else its name without the memory: `a100`, `h100`, …"""
        return self.family or self.name.split("-")[0]

    @property
    def title(self) -> str:
        """As it is shown, in the reader's language."""
        return f"GPU {format_bytes(self.memory_bytes)}" if self.is_of_size else title_words(self.title_en)

    @property
    def is_of_size(self) -> bool:
        """Whether its memory alone is known, and no speed."""
        return not self.peak_flops

    @property
    def device(self) -> Device:
        """Itself, as lab 08 asks for it."""
        return self


def read_gpu(path: Path) -> Device:
    """Read the GPU, or the CPU, that a file describes.

    Raises:
        LabError: if the file lacks a constant, or holds an illegal or impossible one; with its value and line.
    """
    file = ConstantsFile.read(path)
    # A CPU has no context, no cuBLAS and no NCCL.
    on_cuda = path.stem != CPU
    optional = {**_POWER, **_OF_CUDA, **MEASURED} if on_cuda else _POWER
    scalars = {**_SCALARS, **optional}
    file.keys(("title", "generation", "peak", "attention", "products", *scalars))
    peaks = file.table("peak")
    file.keys(PRECISIONS, peaks, "peak")
    constants = {f"peak.{key}": file.constant(key, "FLOP/s", peaks, f"peak.{key}") for key in peaks}
    constants |= {key: file.constant(key, unit) for key, unit in scalars.items() if key in {**_SCALARS, **file.content}}
    fused = file.table("attention") if "attention" in file.content else {}
    file.keys(_ATTENTION, fused, "attention")
    constants |= {
        f"attention.{key}": file.constant(key, "FLOP/s", fused, f"attention.{key}", optional="tokens") for key in fused
    }
    products = _products(file, {key: constants[f"peak.{key}"].value for key in PRECISIONS if key in peaks}, constants)
    if not {"fp32", "fp16", "bf16"} & {*peaks} or ("fp8" in peaks and "bf16" not in peaks):
        raise file.missing("peak.bf16")
    if on_cuda:
        _check_possible(file, constants)
    tokens = {key: file.count("tokens", fused[key], f"attention.{key}") for key in fused if "tokens" in fused[key]}
    return described(path.stem, file.text("title"), constants, file.text("generation", ""), tokens, products)


def described(
    name: str,
    title: str,
    constants: Mapping[str, Constant],
    family: str = "",
    attention_tokens: Mapping[str, int] | None = None,
    product_flops: Mapping[Precision, Mapping[tuple[int, ...], float]] | None = None,
) -> Device:
    """Describe a GPU by the constants of its file; those of its class stand in for what the file leaves out."""
    on_cuda = name != CPU
    figures = CLASS_DEFAULTS | {key: constant.value for key, constant in constants.items()}
    optional = {**_POWER, **_OF_CUDA, **MEASURED} if on_cuda else _POWER
    return Device(
        name=name,
        title_en=title,
        memory_bytes=int(figures["memory"]),
        context_bytes=int(figures["context"]) if on_cuda else 0,
        nccl_bytes=NCCL_BYTES if on_cuda else 0,
        cublas_workspace_bytes=int(figures["cublas_workspace"]) if on_cuda else 0,
        # In the order of PRECISIONS, not of the file.
        peak_flops={key: figures[f"peak.{key}"] for key in PRECISIONS if f"peak.{key}" in figures},
        memory_bytes_per_s=figures["memory_bandwidth"],
        num_sms=int(figures["multiprocessors"]),
        tdp_w=figures["thermal_design_power"],
        idle_w=figures["idle_power"],
        kernel_s=figures["kernel_s"] if on_cuda else 0.0,
        attention_flops={key: figures[f"attention.{key}"] for key in _ATTENTION if f"attention.{key}" in figures},
        constants=constants,
        family=family,
        attention_tokens=attention_tokens or {},
        product_flops=product_flops or {},
        pass_bytes_per_s=figures.get("pass_bandwidth"),
        launch_s=figures.get("launch_s"),
        left_out=tuple(key for key in optional if key not in constants),
    )


def _products(
    file: ConstantsFile, peak_flops: Mapping[Precision, float], constants: dict[str, Constant]
) -> dict[Precision, dict[tuple[int, ...], float]]:
    """Read the rates of measured products by precision and size: in FLOP/s, or as shares of the peak."""
    tables = file.table("products") if "products" in file.content else {}
    file.keys(peak_flops, tables, "products")
    rates: dict[Precision, dict[tuple[int, ...], float]] = {}
    for precision in (key for key in PRECISIONS if key in tables):
        name = f"products.{precision}"
        sized = file.sized(precision, ("FLOP/s", "1"), tables, name)
        unit_flops = peak_flops[precision] if tables[precision]["unit"] == "1" else 1.0
        rates[precision] = {size: rate.value * unit_flops for size, rate in sized.items()}
        fastest = max(sized.values())
        constants[name] = fastest._replace(value=fastest.value * unit_flops, unit="FLOP/s")
    return rates


_AT_MOST: Final = (
    *((f"peak.{key}", f"peak.{half}") for key in ("fp32", "tf32") for half in ("fp16", "bf16")),
    *((f"peak.{key}", "peak.fp8") for key in PRECISIONS),
    *((f"products.{key}", f"peak.{key}") for key in PRECISIONS),
    *((f"attention.{key}", "peak.fp16") for key in _ATTENTION),
    ("pass_bandwidth", "memory_bandwidth"), ("idle_power", "thermal_design_power"), ("context", "memory"),
    ("cublas_workspace", "memory"),
)  # fmt: skip
"""Constants of one file of which the first is never larger than the second."""


def _check_possible(file: ConstantsFile, constants: Mapping[str, Constant]) -> None:
    """Refuse a figure that no GPU can have, alone or beside another one of the same file.

    Raises:
        LabError: naming it, with its value and line.
    """
    for name, limit_name in _AT_MOST:
        if name in constants and limit_name in constants and constants[name].value > constants[limit_name].value:
            value, limit = constants[name].value, constants[limit_name].value
            facts = {"limit_name": limit_name, "limit": limit, "unit": constants[name].unit, "value": value}
            raise file.refuse(file_sentence("at most another", name=name, **facts), name)
    for name, limit in _LONGEST_S.items():
        if name in constants and constants[name].value > limit:
            raise file.refuse(file_sentence("at most", name=name, limit=limit, value=constants[name].value), name)
    for name in ("memory", "multiprocessors", "context", "cublas_workspace"):
        if name in constants and not constants[name].value.is_integer():
            raise file.refuse(file_sentence("whole", name=name, value=constants[name].value), name)


@cache
def _shipped(name: str) -> Device:
    return read_gpu(_FILES[name])


DEVICES: Final[dict[str, Device]] = {
    model.name: model
    # A newer generation has the higher peak in fp16.
    for model in sorted(
        (_shipped(name) for name in GPUS if name != CPU),
        key=lambda model: (model.peak_flops["fp16"], model.memory_bytes),
    )
}
"""All GPU models by name, by generation and memory."""
ALIASES: Final[dict[str, str]] = {
    "h100-80": "h100", "h200-141": "h200", "rtx-3090": "rtx3090", "rtx-4090": "rtx4090", "rtx-a6000": "a6000",
}  # fmt: skip
"""Other names for the same."""
_OTHER_CARDS: Final = r"(?! ?(?:TI|SUPER|LAPTOP|D)\b)"
"""What follows the name of another card: an RTX 3090 Ti is no RTX 3090."""


def device(name: str) -> Device:
    """Look up a GPU model by its name, in any case, or its file, or make one of any size (`24GiB`); the CPU is none.

    Raises:
        LabError: if there is none; the sentence lists those there are.
    """
    # A size ends with a letter, as 24GiB; a name such as v100-32 does not.
    size = size_bytes(name) if name[-1:].isalpha() and not name.endswith(".toml") else None
    if size is not None:
        return _of_size(size)
    sizes = say(en="or a size such as 24GiB", fr="ou une taille telle que 24GiB")
    return _named("device", name, DEVICES, sizes)


@cache
def _of_size(memory_bytes: int) -> Device:
    """Make a GPU of which the memory alone is known: what a process takes of it is the most of all known GPUs."""
    return Device(
        name=f"{memory_bytes}B",
        title_en="GPU",
        memory_bytes=memory_bytes,
        context_bytes=int(CLASS_DEFAULTS["context"]),
        nccl_bytes=NCCL_BYTES,
        cublas_workspace_bytes=int(CLASS_DEFAULTS["cublas_workspace"]),
        left_out=tuple(_OF_CUDA),
    )


def gpu(name: str) -> Device:
    """Look up a GPU, or the CPU, by its name, in any case, or the path of its `.toml` file.

    Raises:
        LabError: if there is none; the sentence lists those there are.
    """
    return _named("GPU", name, GPUS)


def device_of_driver(name: str) -> Device | None:
    """Find the GPU model that a driver calls so (`NVIDIA H100 80GB HBM3`); None for one that is not known, and a CPU.

    Args:
        name: as `torch.cuda.get_device_name` returns it.
    """
    # `A100 40 GB` is the kind A100 and, where there are several of it, the size 40GB.
    titles = {model: model.title_en.upper().rsplit(" ", 2) for model in DEVICES.values()}
    kinds = Counter(kind for kind, *_ in titles.values())
    for model, (kind, *size) in titles.items():
        is_of_kind = re.search(rf"\b{kind}\b{_OTHER_CARDS}", name.upper()) is not None
        if is_of_kind and (kinds[kind] == 1 or "".join(size) in name.upper()):
            return model
    return None


def _named(subject: str, name: str, legal: Iterable[str], hint: str = "") -> Device:
    key = str(name).strip().lower().replace(" ", "-").replace("_", "-")
    key = ALIASES.get(key, key)
    if key in legal:
        return _shipped(key)
    if path := file_of("gpus", name):
        return _read_once(path, path.stat().st_mtime_ns)
    raise LabError(one_of(subject, name, [*legal, *own_files("gpus"), *([hint] if hint else [])]))


@cache
def _read_once(path: Path, changed_ns: int) -> Device:
    del changed_ns  # a file that was written again is read again
    return read_gpu(path)


def write_gpu(path: Path, gpu: Device) -> None:
    """Write the file that describes a GPU, so that `read_gpu` reads the same GPU again.

    Raises:
        LabError: if the folder cannot be written.
    """
    lines = [f"title = {toml_text(gpu.title_en)}", *([f"generation = {toml_text(gpu.family)}"] if gpu.family else [])]
    lines += [constant_line(name, constant) for name, constant in gpu.constants.items() if "." not in name]
    for section in ("peak", "attention"):
        keys = {name.partition(".")[2]: name for name in gpu.constants if name.startswith(f"{section}.")}
        lines += ["", f"[{section}]"] if keys else []
        lines += [
            constant_line(key, gpu.constants[name], tokens=gpu.attention_tokens.get(key)) for key, name in keys.items()
        ]
    for precision, rates in gpu.product_flops.items():
        provenance = gpu.constants[f"products.{precision}"]
        lines += ["", f"[products.{precision}]  # rows, columns and inner size of each product, and its rate"]
        lines += [f"sizes = [{', '.join(str([*size]) for size in rates)}]", f"values = {list(rates.values())!r}"]
        lines += [f"{part} = {toml_text(getattr(provenance, part))}" for part in ("unit", "source", "date", "standing")]
    write_hardware(path, lines)
