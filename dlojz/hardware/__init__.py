"""Hardware of the course: GPUs, their memory and speed, the links between them, clusters, published measurements.

Every figure says where it comes from and how far it is to be trusted; nothing here imports torch.
"""

from dlojz.hardware.clusters import CLUSTERS, Cluster, cluster
from dlojz.hardware.constants import STANDINGS
from dlojz.hardware.gpus import DEVICES, GPUS, Device, Precision, device, gpu
from dlojz.hardware.links import COLLECTIVES, LINKS, Collective, Interconnect, Link, bus_factor, link

__all__ = [
    "CLUSTERS",
    "COLLECTIVES",
    "DEVICES",
    "GPUS",
    "LINKS",
    "STANDINGS",
    "Cluster",
    "Collective",
    "Device",
    "Interconnect",
    "Link",
    "Precision",
    "bus_factor",
    "cluster",
    "device",
    "gpu",
    "link",
]
