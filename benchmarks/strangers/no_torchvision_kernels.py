"""Makes `import torchvision` work beside a torch for CPUs alone, where its kernels do not load."""

import contextlib

import torch

LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
for name in ("nms", "qnms"):
    with contextlib.suppress(RuntimeError):  # known, where the kernels load
        LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
