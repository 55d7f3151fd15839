"""Clusters: which GPU, how many on a node, which links inside and between nodes, what an hour of it draws.

Layer 0. Invariant: a cluster's file names its GPU and its links, and repeats none of their figures unless its own GPU
differs (memory, power), which it then says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final

from dlojz.hardware.constants import Constant, ConstantsFile
from dlojz.hardware.gpus import Gpu, gpu
from dlojz.hardware.links import Interconnect, link
from dlojz.schema import LabError, one_of
from dlojz.text import say

FOLDER: Final = Path(__file__).with_name("data") / "clusters"
TEMPLATE: Final = "template"
CLUSTERS: Final = tuple(sorted(path.stem for path in FOLDER.glob("*.toml") if path.stem != TEMPLATE))
"""Names of all clusters."""
_SCALARS: Final = {"nic_bandwidth": "B/s", "host_memory": "B", "pue": "1", "carbon": "g/kWh"}
_OF_GPU: Final = {
    "memory": "B",
    "memory_bandwidth": "B/s",
    "thermal_design_power": "W",
    "idle_power": "W",
}
_KEYS: Final = (
    "title", "gpu", "gpus_per_node", "num_nodes", "intra", "inter", "nics_per_node", "machine", "own_gpu", *_SCALARS,
)  # fmt: skip


@dataclass(frozen=True)
class Cluster:
    """A cluster as the planner sees it.

    Args:
        name: of its file.
        title: as it is shown.
        gpu: of its nodes.
        gpus_per_node: on one node.
        num_nodes: that a job may have at most.
        intra: link between the GPUs of a node.
        inter: link between nodes; its bandwidth is that of all cards of a node together.
        nics_per_node: network cards of a node.
        nic_bytes_per_s: of one card and direction, as sold.
        host_memory_bytes: of one node.
        machine: name of the file in `slurm/machines` by which jobs are sent there; empty if there is none.
        pue: power usage effectiveness, all of the site's power over that of the machine; at least 1.
        carbon_g_per_kwh: of the site's electricity, in g of CO₂ equivalent.
        constants: each figure with its source; those of the GPU and the links stand with them.
    """

    name: str
    title: str
    gpu: Gpu
    gpus_per_node: int
    num_nodes: int
    intra: Interconnect
    inter: Interconnect
    nics_per_node: int
    nic_bytes_per_s: float
    host_memory_bytes: float
    machine: str
    pue: float
    carbon_g_per_kwh: float
    constants: Mapping[str, Constant]

    @property
    def num_gpus(self) -> int:
        """GPUs that a job may have at most."""
        return self.gpus_per_node * self.num_nodes


def _own_gpu(file: ConstantsFile) -> tuple[Gpu, dict[str, Constant]]:
    """The GPU of a cluster, with what the cluster's file says of it otherwise."""
    found = gpu(file.text("gpu"))
    if "own_gpu" not in file.content:
        return found, {}
    table = file.table("own_gpu")
    file.keys(_OF_GPU, table)
    own = {key: file.constant(key, _OF_GPU[key], table, f"own_gpu.{key}") for key in table}
    device = found.device
    if "memory" in own:
        device = replace(device, memory_bytes=int(own["memory"].value), source=own["memory"].source)
    changed = replace(
        found,
        device=device,
        memory_bytes_per_s=own["memory_bandwidth"].value if "memory_bandwidth" in own else found.memory_bytes_per_s,
        tdp_w=own["thermal_design_power"].value if "thermal_design_power" in own else found.tdp_w,
        idle_w=own["idle_power"].value if "idle_power" in own else found.idle_w,
        constants={**found.constants, **own},
    )
    return changed, {f"own_gpu.{key}": constant for key, constant in own.items()}


def read_cluster(path: Path) -> Cluster:
    """The cluster that a file describes.

    Raises:
        LabError: if the file lacks a constant (named with the file), holds an illegal one, or names an unknown GPU or
            link.
    """
    file = ConstantsFile.read(path)
    file.keys(_KEYS)
    chip, constants = _own_gpu(file)
    constants |= {key: file.constant(key, unit) for key, unit in _SCALARS.items()}
    if constants["pue"].value < 1:
        value = constants["pue"].value
        raise file.refuse(
            f"pue must be at least 1, but {value} was received.",
            f"pue doit être au moins égal à 1, mais {value} a été reçu.",
        )
    return Cluster(
        path.stem,
        file.text("title"),
        chip,
        file.count("gpus_per_node"),
        file.count("num_nodes"),
        link(file.text("intra")),
        link(file.text("inter")),
        file.count("nics_per_node"),
        constants["nic_bandwidth"].value,
        constants["host_memory"].value,
        file.text("machine", ""),
        constants["pue"].value,
        constants["carbon"].value,
        constants,
    )


@cache
def _shipped(name: str) -> Cluster:
    return read_cluster(FOLDER / f"{name}.toml")


def cluster(name: str | Path) -> Cluster:
    """A cluster by its name, or by the path of a file of one's own (ending in `.toml`).

    Raises:
        LabError: if there is none of this name (those there are get listed), or the file is not legal.
    """
    if isinstance(name, Path) or str(name).endswith(".toml"):
        path = Path(name).expanduser()
        if not path.is_file():
            raise LabError(
                say(
                    en=f"there is no hardware file {str(name)!r}: copy hardware/data/clusters/{TEMPLATE}.toml.",
                    fr=f"il n’y a pas de fichier {str(name)!r} : copiez hardware/data/clusters/{TEMPLATE}.toml.",
                )
            )
        return read_cluster(path)
    key = str(name).strip().lower().replace(" ", "_").replace("-", "_")
    if key not in CLUSTERS:
        raise LabError(one_of("cluster", name, CLUSTERS))
    return _shipped(key)
