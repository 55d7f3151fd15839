"""GPUs: memory and what a process takes of it, peak speeds, bandwidth, power.

A peak that a GPU does not have is absent, never zero; peaks are those of dense matrices (without structured sparsity),
per second, decimal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Literal, get_args

from dlojz.base.errors import LabError
from dlojz.base.language import MEBIBYTE, one_of
from dlojz.hardware.constants import Constant, ConstantsFile

CONTEXT_BYTES: Final = 481 * MEBIBYTE
"""Approximate: 0.47 GiB for the CUDA context of one process, measured on an A100 with kernels loaded when first used
(the default since CUDA 11.8); with all kernels loaded at once, 0.92 GiB. It depends on driver and CUDA version."""
NCCL_BYTES: Final = 1536 * MEBIBYTE
"""Approximate: 1.5 GiB more after the first collective of a process (communicators, their buffers and kernels).

Source: Bekman, "Machine Learning Engineering", training/performance, "Anatomy of Model's Memory Usage".
"""
CUBLAS_BYTES: Final = 2 * 4096 * 1024 + 8 * 16 * 1024
"""cuBLAS's workspace for each handle and stream, taken from the allocator: 8.125 MiB (`:4096:2:16:8`) before Hopper.

Source: torch, `aten/src/ATen/cuda/CublasHandlePool.cpp`, `parseChosenWorkspaceSize`.
"""
HOPPER_CUBLAS_BYTES: Final = 8 * 4096 * 1024
"""The same from Hopper on: 32 MiB; so it is on every GPU with `CUBLAS_WORKSPACE_CONFIG=:4096:8`."""


@dataclass(frozen=True)
class Device:
    """Memory of a GPU model.

    Args:
        name: as it is asked for, e.g. `v100-32`.
        title: as it is shown, e.g. `V100 32 GB`.
        memory_bytes: in all, as a process sees it (`torch.cuda.mem_get_info`), which is less than what is sold.
        context_bytes: for the CUDA context of one process, approximate.
        nccl_bytes: for NCCL, in a process that has communicated, approximate.
        cublas_workspace_bytes: for each cuBLAS handle and stream, by default; from the allocator, so part of what
            is reserved. A training process has two handles: one of forward's thread, one of backward's.
        source: where the memory comes from.
    """

    name: str
    title: str
    memory_bytes: int
    context_bytes: int
    nccl_bytes: int
    cublas_workspace_bytes: int
    source: str

    def allocatable_bytes(self, processes: int = 1) -> int:
        """Bytes that the allocator of each of so many processes, one per GPU, can reserve; with NCCL from two on.

        Args:
            processes: at least 1.
        """
        return self.memory_bytes - self.context_bytes - (self.nccl_bytes if processes > 1 else 0)


def _device(name: str, title: str, memory_mib: int, cublas_bytes: int, source: str) -> Device:
    return Device(name, title, memory_mib * MEBIBYTE, CONTEXT_BYTES, NCCL_BYTES, cublas_bytes, source)


_SMI = "total printed by nvidia-smi {} (drivers before 510; later ones print {} MiB, of which a process gets no more)"

DEVICES: Final[dict[str, Device]] = {
    device.name: device
    for device in (
        _device("v100-16", "V100 16 GB", 16160, CUBLAS_BYTES, _SMI.format("V100-SXM2-16GB", 16384)),
        _device("v100-32", "V100 32 GB", 32510, CUBLAS_BYTES, _SMI.format("V100-SXM2-32GB", 32768)),
        _device("a100-40", "A100 40 GB", 40536, CUBLAS_BYTES, _SMI.format("A100-SXM4-40GB", 40960)),
        _device("a100-80", "A100 80 GB", 81251, CUBLAS_BYTES, _SMI.format("A100-SXM4-80GB", 81920)),
        _device(
            "h100",
            "H100 80 GB",
            80998,
            HOPPER_CUBLAS_BYTES,
            "79.10 GiB, the total capacity in torch's out-of-memory message on H100 SXM; nvidia-smi prints 81559 MiB",
        ),
        _device(
            "h200",
            "H200 141 GB",
            143155,
            HOPPER_CUBLAS_BYTES,
            "139.80 GiB, the total capacity in torch's out-of-memory message on H200 SXM; nvidia-smi prints 143771 MiB",
        ),
    )
}
"""All GPU models by name, by generation and memory."""
ALIASES: Final[dict[str, str]] = {"h100-80": "h100", "h200-141": "h200"}
"""Other names for the same."""


def device(name: str) -> Device:
    """Look up the memory of a GPU model by its name, in any case.

    Raises:
        LabError: if there is none; the sentence lists those there are.
    """
    key = str(name).strip().lower().replace(" ", "-").replace("_", "-")
    found = DEVICES.get(ALIASES.get(key, key))
    if found is None:
        raise LabError(one_of("device", name, DEVICES))
    return found


Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]
PRECISIONS: Final = get_args(Precision)
FOLDER: Final = Path(__file__).with_name("data") / "gpus"
GPUS: Final = tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))
"""Names of all GPUs, those of `DEVICES`, and `cpu` for a process without one."""
CPU: Final = "cpu"
SCALARS: Final = {
    "memory_bandwidth": "B/s",
    "multiprocessors": "1",
    "thermal_design_power": "W",
    "idle_power": "W",
}
"""Constants of a GPU's file besides its peaks, with their units."""
_OPTIONAL: Final = {"memory": "B"}
_KEYS: Final = ("title", "peak", "attention", *SCALARS, *_OPTIONAL)
AttentionKernel = Literal["flash2", "flash1", "flash3", "cudnn"]
ATTENTION_KERNELS: Final = get_args(AttentionKernel)
"""Generations of fused attention: FlashAttention-2 (what torch's `scaled_dot_product_attention` runs), FlashAttention
and its first kernel in Triton, FlashAttention-3, cuDNN's."""
HEAD_SIZES: Final = (64, 128)
"""Sizes of a head for which the rates of fused attention are published."""
_ATTENTION: Final = tuple(
    f"{kernel}_{way}_{size}" for kernel in ATTENTION_KERNELS for way in ("forward", "backward") for size in HEAD_SIZES
)


@dataclass(frozen=True)
class Gpu:
    """Speed, power and memory of a GPU.

    Args:
        name: as it is asked for, e.g. `a100-80`.
        title: as it is shown.
        device: its memory, and what is taken of it before a model gets anything.
        peak_flops: dense peak of the matrix units by precision, in FLOP/s; absent where the GPU has none.
        memory_bytes_per_s: bandwidth of its memory.
        num_sms: multiprocessors, over which the tiles of a product are distributed.
        tdp_w: thermal design power.
        idle_w: power without work.
        attention_flops: rate of fused attention at long sequences in FLOP/s, by kernel, pass and head size
            (`flash2_forward_128`); absent where nobody has published it.
        constants: each figure with its source.
    """

    name: str
    title: str
    device: Device
    peak_flops: Mapping[Precision, float]
    memory_bytes_per_s: float
    num_sms: int
    tdp_w: float
    idle_w: float
    attention_flops: Mapping[str, float]
    constants: Mapping[str, Constant]


def read_gpu(path: Path) -> Gpu:
    """Read the GPU that a file describes; its memory is that of the `Device` of the same name, or in the file.

    Raises:
        LabError: if the file lacks a constant, or holds an illegal one.
    """
    file = ConstantsFile.read(path)
    file.keys(_KEYS)
    peaks = file.table("peak")
    file.keys(PRECISIONS, peaks)
    constants = {f"peak.{key}": file.constant(key, "FLOP/s", peaks, f"peak.{key}") for key in peaks}
    constants |= {key: file.constant(key, unit) for key, unit in SCALARS.items()}
    fused = file.table("attention") if "attention" in file.content else {}
    file.keys(_ATTENTION, fused)
    constants |= {f"attention.{key}": file.constant(key, "FLOP/s", fused, f"attention.{key}") for key in fused}
    device = DEVICES.get(path.stem)
    if device is None:
        memory = file.constant("memory", _OPTIONAL["memory"])
        constants["memory"] = memory
        device = Device(path.stem, file.text("title"), int(memory.value), 0, 0, 0, memory.source)
    return Gpu(
        path.stem,
        file.text("title"),
        device,
        {key: constants[f"peak.{key}"].value for key in PRECISIONS if key in peaks},
        constants["memory_bandwidth"].value,
        int(constants["multiprocessors"].value),
        constants["thermal_design_power"].value,
        constants["idle_power"].value,
        {key: constants[f"attention.{key}"].value for key in fused},
        constants,
    )


@cache
def _shipped(name: str) -> Gpu:
    return read_gpu(FOLDER / f"{name}.toml")


def gpu(name: str) -> Gpu:
    """Look up a GPU by its name, in any case.

    Raises:
        LabError: if there is none; the sentence lists those there are.
    """
    key = str(name).strip().lower().replace(" ", "-").replace("_", "-")
    key = ALIASES.get(key, key)
    if key not in GPUS:
        raise LabError(one_of("GPU", name, GPUS))
    return _shipped(key)
