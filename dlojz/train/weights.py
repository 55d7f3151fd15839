"""Final weights: their checksum, and their file where a run keeps it.

Layer 3. Invariant: safetensors only; the file appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def weights_sha256(weights: Mapping[str, Tensor]) -> str:
    """Checksum of names, shapes and values, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().float().contiguous()
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def save_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write all weights as safetensors, atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file({name: tensor.detach().contiguous() for name, tensor in weights.items()}, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load_weights(path: Path) -> dict[str, Tensor]:
    """Read what `save_weights` has written."""
    return load_file(path, device=str(torch.device("cpu")))
