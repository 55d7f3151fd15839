"""Hardware of the course: GPUs, their memory and speed, the links between them, clusters, published measurements.

Every figure says where it comes from and how far it is to be trusted; nothing here imports torch.
"""

from __future__ import annotations

from dlojz.hardware.clusters import CLUSTERS, Cluster, cluster, read_cluster
from dlojz.hardware.constants import STANDINGS, Constant
from dlojz.hardware.gpus import (
    ALIASES,
    CONTEXT_BYTES,
    DEVICES,
    GPUS,
    NCCL_BYTES,
    Device,
    Precision,
    device,
    gpu,
)
from dlojz.hardware.links import COLLECTIVES, LINKS, Collective, Interconnect, Link, bus_factor, link

__all__ = [
    "ALIASES",
    "CLUSTERS",
    "COLLECTIVES",
    "CONTEXT_BYTES",
    "DEVICES",
    "GPUS",
    "LINKS",
    "NCCL_BYTES",
    "STANDINGS",
    "Cluster",
    "Collective",
    "Constant",
    "Device",
    "Interconnect",
    "Link",
    "Precision",
    "bus_factor",
    "cluster",
    "device",
    "gpu",
    "link",
    "read_cluster",
]
