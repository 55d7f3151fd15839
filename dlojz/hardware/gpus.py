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
from dlojz.hardware.constants import Constant, ConstantsFile, title_words

NCCL_BYTES: Final = 1536 * MEBIBYTE
"""Approximate: 1.5 GiB more after the first collective of a process (communicators, their buffers and kernels).

Source: Bekman, "Machine Learning Engineering", training/performance, "Anatomy of Model's Memory Usage".
"""
Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]
PRECISIONS: Final = get_args(Precision)
FOLDER: Final = Path(__file__).with_name("data") / "gpus"
GPUS: Final = tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))
"""Names of all GPUs, those of `DEVICES`, and `cpu` for a process without one."""
CPU: Final = "cpu"
_SCALARS: Final = {
    "memory": "B",
    "memory_bandwidth": "B/s",
    "multiprocessors": "1",
    "thermal_design_power": "W",
    "idle_power": "W",
}
"""Constants of a file besides the peaks, with their units."""
_OF_CUDA: Final = {"cublas_workspace": "B", "context": "B", "kernel_s": "s"}
"""The same, of GPUs alone."""
AttentionKernel = Literal["flash2", "flash1", "flash3", "cudnn"]
ATTENTION_KERNELS: Final = get_args(AttentionKernel)
"""Generations of fused attention: FlashAttention-2 (what torch's `scaled_dot_product_attention` runs), FlashAttention
and its first kernel in Triton, FlashAttention-3, cuDNN's."""
HEAD_SIZES: Final = (64, 128)
"""Sizes of a head for which the rates of fused attention are published."""
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
    """

    name: str
    title_en: str
    memory_bytes: int
    context_bytes: int
    nccl_bytes: int
    cublas_workspace_bytes: int
    peak_flops: Mapping[Precision, float] = field(hash=False)
    memory_bytes_per_s: float
    num_sms: int
    tdp_w: float
    idle_w: float
    kernel_s: float
    attention_flops: Mapping[str, float] = field(hash=False)
    constants: Mapping[str, Constant] = field(hash=False)

    def allocatable_bytes(self, processes: int = 1) -> int:
        """Bytes that the allocator of each of so many processes, one per GPU, can reserve; with NCCL from two on.

        Args:
            processes: at least 1.
        """
        # A single process makes no communicator.
        return self.memory_bytes - self.context_bytes - (self.nccl_bytes if processes > 1 else 0)

    @property
    def generation(self) -> str:
        """Generation: its name without the memory, `a100`, `h100`, …"""
        return self.name.split("-")[0]

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
        LabError: if the file lacks a constant, or holds an illegal one.
    """
    file = ConstantsFile.read(path)
    # A CPU has no context, no cuBLAS and no NCCL.
    on_cuda = path.stem != CPU
    scalars = {**_SCALARS, **_OF_CUDA} if on_cuda else _SCALARS
    file.keys(("title", "peak", "attention", *scalars))
    peaks = file.table("peak")
    file.keys(PRECISIONS, peaks)
    constants = {f"peak.{key}": file.constant(key, "FLOP/s", peaks, f"peak.{key}") for key in peaks}
    constants |= {key: file.constant(key, unit) for key, unit in scalars.items()}
    fused = file.table("attention") if "attention" in file.content else {}
    file.keys(_ATTENTION, fused)
    constants |= {f"attention.{key}": file.constant(key, "FLOP/s", fused, f"attention.{key}") for key in fused}
    return Device(
        name=path.stem,
        title_en=file.text("title"),
        memory_bytes=int(constants["memory"].value),
        context_bytes=int(constants["context"].value) if on_cuda else 0,
        nccl_bytes=NCCL_BYTES if on_cuda else 0,
        cublas_workspace_bytes=int(constants["cublas_workspace"].value) if on_cuda else 0,
        # In the order of PRECISIONS, not of the file.
        peak_flops={key: constants[f"peak.{key}"].value for key in PRECISIONS if key in peaks},
        memory_bytes_per_s=constants["memory_bandwidth"].value,
        num_sms=int(constants["multiprocessors"].value),
        tdp_w=constants["thermal_design_power"].value,
        idle_w=constants["idle_power"].value,
        kernel_s=constants["kernel_s"].value if on_cuda else 0.0,
        attention_flops={key: constants[f"attention.{key}"].value for key in fused},
        constants=constants,
    )


@cache
def _shipped(name: str) -> Device:
    return read_gpu(FOLDER / f"{name}.toml")


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
    """Look up a GPU model by its name, in any case, or make one of any size (`24GiB`, `48GB`); the CPU is none.

    Raises:
        LabError: if there is none; the sentence lists those there are.
    """
    # A size ends with a letter, as 24GiB; a name such as v100-32 does not.
    size = size_bytes(name) if name[-1:].isalpha() else None
    if size is not None:
        return _of_size(size)
    sizes = say(en="or a size such as 24GiB", fr="ou une taille telle que 24GiB")
    return _named("device", name, DEVICES, sizes)


@cache
def _of_size(memory_bytes: int) -> Device:
    """Make a GPU of which the memory alone is known: what a process takes of it is the most of all known GPUs."""
    devices = DEVICES.values()
    return Device(
        name=f"{memory_bytes}B",
        title_en="GPU",
        memory_bytes=memory_bytes,
        context_bytes=max(model.context_bytes for model in devices),
        nccl_bytes=NCCL_BYTES,
        cublas_workspace_bytes=max(model.cublas_workspace_bytes for model in devices),
        peak_flops={},
        # Not known: times that are computed from it are NaN.
        memory_bytes_per_s=math.nan,
        num_sms=0,
        tdp_w=math.nan,
        idle_w=math.nan,
        kernel_s=math.nan,
        attention_flops={},
        constants={},
    )


def gpu(name: str) -> Device:
    """Look up a GPU, or the CPU, by its name, in any case.

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
    if key not in legal:
        raise LabError(one_of(subject, name, [*legal, *([hint] if hint else [])]))
    return _shipped(key)
