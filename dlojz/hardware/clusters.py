"""Read the clusters, one TOML file each: their nodes, GPUs, links and prices, and how jobs are sent there.

A file names its GPU and its links, and repeats none of their figures unless its own GPU differs (memory, power). Its
table `slurm` holds what the scheduler must be told; it is checked word by word, so that nothing in it can become
another line of a job script.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import Field, model_validator

from dlojz.base.contract import Contract
from dlojz.base.errors import LabError
from dlojz.base.files import COURSE
from dlojz.base.language import one_of, say
from dlojz.hardware.constants import Constant, ConstantsFile, file_refused, file_sentence, title_words
from dlojz.hardware.gpus import Device, gpu
from dlojz.hardware.links import Interconnect, link

FOLDER: Final = Path(__file__).with_name("data") / "clusters"
TEMPLATE: Final = "template"
_EXAMPLE: Final = f"dlojz/hardware/data/clusters/{TEMPLATE}.toml"
CLUSTERS: Final = tuple(sorted(path.stem for path in FOLDER.glob("*.toml") if path.stem != TEMPLATE))
"""Names of all clusters."""
_SCALARS: Final = {"nic_bandwidth": "B/s", "host_memory": "B", "pue": "1", "carbon": "g/kWh"}
_OF_GPU: Final = {
    "memory": ("B", "memory_bytes"),
    "memory_bandwidth": ("B/s", "memory_bytes_per_s"),
    "thermal_design_power": ("W", "tdp_w"),
    "idle_power": ("W", "idle_w"),
}
"""What a cluster's file may say of the GPU it has: the unit, and the field of `Device`."""
_KEYS: Final = (
    "title", "gpu", "gpus_per_node", "num_nodes", "intra", "inter", "nics_per_node", "own_gpu", *_SCALARS, "slurm",
)  # fmt: skip


@dataclass(frozen=True)
class Cluster:
    """Cluster: its GPUs, nodes and links, and its power.

    Args:
        name: of its file.
        num_nodes: that a job may have at most.
        intra: link between the GPUs of a node.
        inter: link between nodes; its bandwidth is that of all cards of a node together.
        nics_per_node: network cards of a node.
        nic_bytes_per_s: of one card and direction, as sold.
        host_memory_bytes: of one node.
        machine: how jobs are sent there; None where none are.
        pue: power usage effectiveness, all of the site's power over that of the machine; at least 1.
        carbon_g_per_kwh: of the site's electricity, in g of CO₂ equivalent.
        constants: each figure with its source; those of the GPU and the links stand with them.
    """

    name: str
    title_en: str
    gpu: Device
    gpus_per_node: int
    num_nodes: int
    intra: Interconnect
    inter: Interconnect
    nics_per_node: int
    nic_bytes_per_s: float
    host_memory_bytes: float
    machine: Machine | None
    pue: float
    carbon_g_per_kwh: float
    constants: Mapping[str, Constant]

    @property
    def title(self) -> str:
        """As people call it, in the reader's language."""
        return title_words(self.title_en)

    @property
    def num_gpus(self) -> int:
        """GPUs that a job may have at most."""
        return self.gpus_per_node * self.num_nodes


def _own_gpu(file: ConstantsFile) -> tuple[Device, dict[str, Constant]]:
    """The GPU of a cluster, with what the cluster's file says of it otherwise."""
    chip = gpu(file.named("gpu"))
    if "own_gpu" not in file.content:
        return chip, {}
    table = file.table("own_gpu")
    file.keys(_OF_GPU, table, "own_gpu")
    own_constants = {key: file.constant(key, _OF_GPU[key][0], table, f"own_gpu.{key}") for key in table}
    changed: dict[str, Any] = {_OF_GPU[key][1]: constant.value for key, constant in own_constants.items()}
    if "memory" in own_constants:
        changed["memory_bytes"] = int(own_constants["memory"].value)
    # Of a card that is held at less power, the clock follows: P grows as f·V², and V as f.
    if "thermal_design_power" in own_constants:
        clock = min(1.0, (own_constants["thermal_design_power"].value - chip.idle_w) / (chip.tdp_w - chip.idle_w)) ** (
            1 / 3
        )
        changed["peak_flops"] = {key: value * clock for key, value in chip.peak_flops.items()}
        changed["attention_flops"] = {key: value * clock for key, value in chip.attention_flops.items()}
        changed["product_flops"] = {
            key: {size: rate * clock for size, rate in rates.items()} for key, rates in chip.product_flops.items()
        }
    cluster_gpu = replace(chip, constants={**chip.constants, **own_constants}, **changed)
    return cluster_gpu, {f"own_gpu.{key}": constant for key, constant in own_constants.items()}


def read_cluster(path: Path) -> Cluster:
    """Read the cluster that a file describes.

    Raises:
        LabError: if the file lacks a constant (named with the file), holds an illegal one, or names an unknown GPU or
            link.
    """
    return _cluster(ConstantsFile.read(path))


def _cluster(file: ConstantsFile) -> Cluster:
    if "machine" in file.content:
        raise file.refuse(file_sentence("machine", example=_EXAMPLE))
    file.keys(_KEYS)
    chip, constants = _own_gpu(file)
    constants |= {key: file.constant(key, unit) for key, unit in _SCALARS.items()}
    if constants["pue"].value < 1:
        value = constants["pue"].value
        raise file.refuse(file_sentence("pue", value=value))
    return Cluster(
        file.path.stem,
        file.text("title"),
        chip,
        file.count("gpus_per_node"),
        file.count("num_nodes"),
        link(file.named("intra")),
        link(file.named("inter")),
        file.count("nics_per_node"),
        constants["nic_bandwidth"].value,
        constants["host_memory"].value,
        _machine(file) if "slurm" in file.content else None,
        constants["pue"].value,
        constants["carbon"].value,
        constants,
    )


@cache
def _shipped(name: str) -> Cluster:
    return read_cluster(FOLDER / f"{name}.toml")


def cluster(name: str | Path) -> Cluster:
    """Look up a cluster by its name, or read it from the path of a `.toml` file.

    Raises:
        LabError: if there is none of this name (those there are get listed), or the file is not legal.
    """
    if isinstance(name, Path) or str(name).endswith(".toml"):
        path = Path(name).expanduser()
        if not path.is_file():
            raise file_refused("no cluster file", name=str(name), example=_EXAMPLE)
        return read_cluster(path)
    # Blanks and hyphens are taken for underscores.
    key = str(name).strip().lower().replace(" ", "_").replace("-", "_")
    if key not in CLUSTERS:
        raise LabError(one_of("cluster", name, CLUSTERS))
    return _shipped(key)


def machine_of(cluster: Cluster) -> Machine | None:
    """Read how jobs are sent to a cluster: by one's own machine file of that name, else as the cluster's says."""
    path = machine_files().get(cluster.name, FOLDER)
    return cluster.machine if path.is_relative_to(FOLDER) else read_machine(path)


NAME_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,63}$"
_OPTIONAL_NAME = r"^([A-Za-z0-9_][A-Za-z0-9_.@+,&|-]{0,63})?$"
# `$NAME` may stand at the beginning, alone or before a slash.
_WORD = re.compile(r"(\$[A-Za-z_][A-Za-z0-9_]{0,63}(?=/|$))?[A-Za-z0-9@._/:=+,-]{0,200}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_COMMANDS = ("module", "source", "conda", "ulimit")
_LONGEST_H = 24 * 366
"""No scheduler gives a job longer than a year."""


class _FileContract(Contract):
    """Part of a machine file: a number is a number there, no truth value and no text."""

    @model_validator(mode="before")
    @classmethod
    def _of_the_types_that_toml_tells_apart(cls, data: Any) -> Any:
        for key, value in data.items() if isinstance(data, dict) else ():
            field = cls.model_fields.get(key)
            # pydantic would take "4" or true for a number.
            numeric = field is not None and field.annotation in (int, float, int | None, float | None)
            if numeric and (isinstance(value, bool | str)):
                raise file_refused("number", key=key, value=value)
            if field is not None and field.annotation is bool and not isinstance(value, bool):
                raise file_refused("truth value", key=key, value=value)
        return data


class Qos(_FileContract):
    """A quality of service: a queue with limits."""

    name: str = Field(pattern=NAME_PATTERN, description="as the scheduler knows it")
    max_hours: float = Field(gt=0, le=_LONGEST_H, description="longest job")
    max_gpus: int | None = Field(None, ge=1, description="GPUs of one job; without it, no limit")


class Machine(_FileContract):
    """One kind of node of a cluster, and how jobs are sent there."""

    schema_version: Literal[1] = 1
    name: str = Field(pattern=NAME_PATTERN, description="of the file, without .toml")
    title: str = Field(max_length=200, description="what people call it")
    source: str = Field(max_length=500, description="where its figures are from")
    date: str = Field(pattern=r"^\d{4}-\d{2}-\d{2}$", description="when they were looked up")
    cluster: str = Field("", pattern=_OPTIONAL_NAME, description="ClusterName of slurm.conf; chosen by itself there")
    partition: str = Field("", pattern=_OPTIONAL_NAME)
    constraint: str = Field("", pattern=_OPTIONAL_NAME, description="feature that the nodes must have")
    reservation: str = Field("", pattern=_OPTIONAL_NAME, description="of a course, say")
    account_suffix: str = Field("", pattern=r"^(@[A-Za-z0-9_-]{1,30})?$", description="end of every account's name")
    account_variable: str = Field("", pattern=r"^([A-Za-z_][A-Za-z0-9_]{0,63})?$", description="holds the account")
    qos: tuple[Qos, ...] = Field((), description="the first that fits is asked for")
    max_hours: float = Field(gt=0, le=_LONGEST_H, description="longest job of the partition")
    default_minutes: int = Field(10, ge=1, description="time limit where none is asked for")
    max_nodes: int = Field(ge=1)
    gpus_per_node: int = Field(ge=1, le=64, description="ranks of a full node, where it has no GPU")
    gres: str = Field("gpu", pattern=r"^(gpu(:[A-Za-z0-9_.-]{1,40})?)?$", description="empty: the nodes have no GPU")
    cpus_per_gpu: int = Field(ge=1)
    memory_gib_per_node: int | None = Field(None, ge=1, description="without it, the scheduler's own share is taken")
    device: str = Field(description="device of the nodes (see `dlojz memory --help`), or cpu")
    nomultithread: bool = Field(False, description="one thread per physical core")
    exclusive: bool = Field(False, description="whole nodes, billed as such")
    setup: tuple[tuple[str, ...], ...] = Field((), description="commands before the ranks start, as lists of words")
    torch_module: str = Field("", description="module that holds torch there, loaded after `setup`; empty for none")
    environment: dict[str, str] = Field(default_factory=dict, description="variables that the ranks find")
    python: str = Field("", description="interpreter; without it, the one that submits")
    normalised_hour_factor: float | None = Field(None, gt=0, description="hours billed per GPU-hour")
    interconnect: str = Field("", max_length=300)

    @model_validator(mode="after")
    def _words_are_words(self) -> Self:
        gpu(self.device)  # raises if there is none
        for line in self.setup:
            if not line or line[0] not in _COMMANDS:
                raise LabError(one_of("setup command", line[0] if line else "", _COMMANDS))
        words = [(f"setup {' '.join(line)!r}", word) for line in self.setup for word in line]
        words += [(f"environment {name}", value) for name, value in self.environment.items()]
        words += [("python", self.python), ("torch_module", self.torch_module)]
        for location, word in words:
            # An empty word is one only where the field may be left out.
            if not _WORD.fullmatch(word) or (not word and location not in ("python", "torch_module")):
                raise file_refused("word", location=location, word=word)
        for name in self.environment:
            if not _VARIABLE.fullmatch(name):
                raise file_refused("variable", name=name)
        return self


def machine_files() -> dict[str, Path]:
    """List the files of all machines by name, without the template; of two of one name the first folder's counts.

    The folders of `$DLOJZ_MACHINES` come first, then `slurm/machines` of the checkout, then the clusters of the course.
    """
    extra_folders = [Path(part).expanduser() for part in os.environ.get("DLOJZ_MACHINES", "").split(os.pathsep) if part]
    files: dict[str, Path] = {}
    for folder in (*extra_folders, COURSE / "slurm" / "machines"):
        for path in sorted(folder.glob("*.toml")):
            if path.stem != TEMPLATE:
                files.setdefault(path.stem, path)
    for name in CLUSTERS:
        if _shipped(name).machine:
            files.setdefault(name, FOLDER / f"{name}.toml")
    return files


def machine(name: str) -> Machine:
    """Read the machine file of this name.

    Raises:
        LabError: if no file has this name (those there are get listed), or the file is not legal.
    """
    files = machine_files()
    if name not in files:
        raise LabError(one_of("machine", name, files))
    return read_machine(files[name])


def read_machine(path: Path) -> Machine:
    """Read the machine that a file describes; of a whole cluster's file, the cluster is checked with it.

    Raises:
        LabError: if it cannot be read, is no TOML, holds an unknown key or an illegal value, or does not say how jobs
            are sent there.
    """
    file = ConstantsFile.read(path)
    # A file without links and prices is one of jobs alone.
    cluster_machine = _cluster(file).machine if "intra" in file.content else None
    return cluster_machine or _machine(file)


def _machine(file: ConstantsFile) -> Machine:
    """Check how jobs are sent to a cluster, by its table `slurm`; what plans need too stands above it."""
    table, common = file.content, dict[str, Any]()
    # Machine files had all their keys at the top once, with `device` for `gpu`.
    if "device" not in file.content:
        file.keys(_KEYS)
        if "slurm" not in file.content:
            raise file.refuse(file_sentence("no jobs", example=_EXAMPLE))
        common = {
            "title": file.text("title"),
            "device": file.named("gpu"),
            "gpus_per_node": file.count("gpus_per_node"),
        }
        if "num_nodes" in file.content:
            common["max_nodes"] = file.count("num_nodes")
        table = file.table("slurm")
    try:
        return _from_toml(file.path.stem, common, table)
    except LabError as error:
        raise file_refused("machine file", name=file.path.name, error=error) from None


def _from_toml(name: str, common: dict[str, Any], table: Mapping[str, Any]) -> Machine:
    legal = sorted(set(Machine.model_fields) - {"name"})
    for key in ("cluster", "partition", "constraint", "reservation", "python"):
        if table.get(key) == "":
            raise file_refused("empty text", key=key)
    for key in table:
        if key not in legal:
            raise LabError(one_of("key", key, legal))
    qos_tables = table.get("qos", [])
    if not isinstance(qos_tables, list):
        raise LabError(say(en="qos is a list of [[qos]] tables.", fr="qos est une liste de tables [[qos]]."))
    return Machine(**{**common, **table, "name": name, "qos": tuple(map(Qos.from_dict, qos_tables))})


def here() -> list[str]:
    """List the machines of the cluster that this computer belongs to, by `ClusterName` of slurm.conf."""
    cluster = cluster_name()
    return [] if not cluster else [name for name in machine_files() if _cluster_of(name) == cluster]


def _cluster_of(name: str) -> str:
    try:
        return machine(name).cluster
    except LabError:  # another site's damaged file is no reason to stop here
        return ""


def cluster_name() -> str:
    """Read `ClusterName` from this computer's slurm.conf; empty where there is none."""
    for path in filter(None, [os.environ.get("SLURM_CONF"), "/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf"]):
        try:
            text = Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        # In slurm.conf names of parameters may be written in any case.
        match = re.search(r"^\s*ClusterName\s*=\s*(\S+)", text, re.MULTILINE | re.IGNORECASE)
        if match:
            return match[1]
    return ""


def choose(name: str | None, fits: Iterable[str] | None = None) -> Machine:
    """Choose the machine to submit to: the one named, else `$DLOJZ_MACHINE`, else this cluster's, else the only one.

    Args:
        fits: names that the run fits on, where several are of this cluster; the first is taken.

    Raises:
        LabError: if none is named and there is more than one to choose from.
    """
    machine_name = name or os.environ.get("DLOJZ_MACHINE")
    if machine_name:
        return machine(machine_name)
    local_machines = here()
    candidates = local_machines or list(machine_files())
    if len(candidates) == 1:
        return machine(candidates[0])
    fitting = set(fits or ()) if local_machines else set()  # read once: `fits` may be a generator
    if fitting & set(candidates):
        return machine(next(name for name in candidates if name in fitting))
    raise file_refused("several machines", candidates=", ".join(candidates))
