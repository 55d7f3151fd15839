"""Make torchvision, and so timm, importable with a torch for which torchvision's extension was not built.

With a CPU-only torch the extension of PyPI's torchvision does not load, its operators are not registered, and ``import
torchvision`` stops at ``operator torchvision::nms does not exist``. Two schemas without an implementation are enough;
the lab never calls them. Where the extension loads, nothing changes.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_OPERATORS = ("nms", "qnms")

# torch drops the operators of a Library that is garbage-collected: this list keeps it alive.
_libraries: list[object] = []


def ensure_torchvision_imports() -> None:
    """Make ``import torchvision`` and ``import timm`` work; call it before either, as often as you like.

    Raises:
        ModuleNotFoundError: torchvision is not installed.
    """
    import torch

    if _libraries or _extension_loads():
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in _OPERATORS:
        if not hasattr(torch.ops.torchvision, operator):
            library.define(f"{operator}{_SCHEMA}")
    _libraries.append(library)


def _extension_loads() -> bool:
    """Say whether torchvision's compiled operators are registered, or register now."""
    import torch

    if hasattr(torch.ops.torchvision, "nms"):
        return True
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("torchvision is not installed: install the packages of requirements.txt.")
    for extension in Path(spec.origin).parent.glob("_C*"):
        try:
            torch.ops.load_library(str(extension))
        except OSError:
            continue
    return hasattr(torch.ops.torchvision, "nms")
