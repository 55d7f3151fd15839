"""Limits of a job: time, nodes, GPU-hours, account and QoS, checked and shown before anything is sent.

Every refusal is one sentence with what would work. A job that would wait for ever (more time than the partition gives,
more nodes than it has: the scheduler accepts both) is refused here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from dlojz.base.contract import Contract
from dlojz.base.errors import LabError
from dlojz.base.language import Sentences, one_of, say, shortest, significant
from dlojz.base.table import Table, Tabular, facts
from dlojz.config.run_config import RunConfig
from dlojz.hardware.clusters import NAME_PATTERN, Machine, Qos, choose, machine_files
from dlojz.hardware.clusters import machine as named
from dlojz.hardware.constants import title_words

phrase = Sentences(Path(__file__).parent / "slurm" / "data" / "limits.md")

ACCOUNT_VARIABLE = "DLOJZ_ACCOUNT"
LONGEST_WARNING_S = 120
"""Seconds before the time limit at which the ranks are asked to save and stop; less for a short job."""


class JobRequest(Contract):
    """Options of the scheduler besides the run itself."""

    account: str = Field("", pattern=rf"^$|{NAME_PATTERN}", description="whose hours are billed")
    qos: str = Field("", pattern=rf"^$|{NAME_PATTERN}", description="by default the first that fits")
    reservation: str = Field("", pattern=rf"^$|{NAME_PATTERN}", description="by default the machine file's")
    time_limit_s: float | None = Field(None, gt=0, description="by default the machine file's")
    requeues: int = Field(3, ge=0, le=20, description="how often a job stopped in time goes back to the queue")


@dataclass(frozen=True)
class NodeRequest:
    """Nodes, time and account that a job asks for.

    Args:
        nodes, ranks_per_node: their product is the number of ranks.
        gpus: billed, those of whole nodes where nodes are not shared.
        minutes: time limit, which the scheduler counts in whole minutes.
        warning_s: seconds before the limit at which the ranks are warned.
        qos, account, reservation: empty where none is asked for.
    """

    nodes: int
    ranks_per_node: int
    gpus: int
    minutes: int
    warning_s: int
    qos: str
    account: str
    reservation: str

    @property
    def gpu_hours(self) -> float:
        """GPUs × time limit: the most that can be billed, since a run that ends earlier frees its nodes."""
        return self.gpus * self.minutes / 60


def allocate(
    machine: Machine, config: RunConfig, request: JobRequest, environment: Mapping[str, str] | None = None
) -> tuple[NodeRequest, list[str]]:
    """Compute what the run takes on this machine, and why it would be refused: one sentence each."""
    environment = os.environ if environment is None else environment
    # Of a machine without GPUs, a full node has that many ranks.
    ranks, full = config.layout.world_size, machine.gpus_per_node
    nodes = math.ceil(ranks / full)
    gpus = nodes * full if machine.exclusive else ranks
    wanted_s = machine.default_minutes * 60 if request.time_limit_s is None else request.time_limit_s
    minutes = max(1, math.ceil(wanted_s / 60))
    account, no_account = _account(machine, request, environment)
    qos, no_qos = _qos(machine, request, minutes, gpus)
    allocation = NodeRequest(
        nodes=nodes,
        ranks_per_node=min(ranks, full),
        gpus=gpus,
        minutes=minutes,
        # A fifth of the time limit (60 s × minutes / 5), between 10 and 120 s.
        warning_s=min(LONGEST_WARNING_S, max(10, minutes * 60 // 5)),
        qos=qos,
        account=account,
        reservation=request.reservation or machine.reservation,
    )
    refusals = [_shape(machine, ranks), _size(machine, nodes, ranks), _device(machine, config), no_account, no_qos]
    return allocation, [refusal for refusal in refusals if refusal]


def admit(machine: Machine, config: RunConfig, request: JobRequest) -> NodeRequest:
    """Compute what the run takes on this machine.

    Raises:
        LabError: if the machine would refuse it, or let it wait for ever, with all reasons.
    """
    allocation, refusals = allocate(machine, config, request)
    if refusals:
        raise LabError(" ".join(refusals))
    return allocation


def fitting_qos(machine: Machine, minutes: int, gpus: int) -> list[Qos]:
    """Return the QoS whose limits a job keeps, in the order of the machine file."""
    # Without max_gpus any number of GPUs fits.
    return [qos for qos in machine.qos if minutes <= qos.max_hours * 60 and gpus <= (qos.max_gpus or gpus)]


def _shape(machine: Machine, ranks: int) -> str:
    full = machine.gpus_per_node
    # A job asks for the same number of ranks on each node.
    if ranks <= full or ranks % full == 0:
        return ""
    below = ranks - ranks % full
    return phrase("whole nodes", ranks=ranks, machine=machine, full=full, below=below, above=below + full)


def _size(machine: Machine, nodes: int, ranks: int) -> str:
    if nodes <= machine.max_nodes:
        return ""
    max_ranks = machine.max_nodes * machine.gpus_per_node
    return phrase("too many nodes", ranks=ranks, nodes=nodes, machine=machine, max_ranks=max_ranks)


def _device(machine: Machine, config: RunConfig) -> str:
    if config.device == "cuda" and machine.device == "cpu":
        return phrase("no GPU that computes", machine=machine)
    if config.device == "cpu" and machine.device != "cpu":
        return phrase("GPUs that would stand idle", machine=machine)
    return ""


def _account(machine: Machine, request: JobRequest, environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the account that is billed, and why it would be refused."""
    suffix = machine.account_suffix
    # What is asked for, then $DLOJZ_ACCOUNT, then the site's own variable, which may lack the ending.
    account = request.account or environment.get(ACCOUNT_VARIABLE, "")
    if not account and machine.account_variable and environment.get(machine.account_variable):
        account = environment[machine.account_variable].removesuffix(suffix) + suffix
    if account:
        try:
            # It is written into the job script: a name that is no plain word is refused here.
            JobRequest(account=account)
        except LabError as error:
            return "", str(error)
    if account and not account.endswith(suffix):
        # What may stand behind an @ is replaced by the ending.
        right = account.partition("@")[0] + suffix
        return account, phrase("ending of the account", account=account, suffix=suffix, machine=machine, right=right)
    if not account and suffix:
        return "", phrase("no account", machine=machine, suffix=suffix, variable=ACCOUNT_VARIABLE)
    return account, ""


def _qos(machine: Machine, request: JobRequest, minutes: int, gpus: int) -> tuple[str, str]:
    """Return the QoS asked for, and why the time or the size would be refused."""
    hours = minutes / 60
    names = {qos.name: qos for qos in machine.qos}
    fitting = [qos.name for qos in fitting_qos(machine, minutes, gpus)]
    if request.qos and names and request.qos not in names:
        return request.qos, one_of("QoS", request.qos, names)
    if hours > machine.max_hours:
        return request.qos, phrase(
            "too many hours", hours=shortest(hours), machine=machine, max_hours=shortest(machine.max_hours)
        )
    # No QoS to choose from, or one that fits: nothing to refuse.
    if not names or (request.qos and request.qos in fitting) or (fitting and not request.qos):
        return request.qos or (fitting[0] if fitting else ""), ""
    limits = ", ".join(f"{qos.name} ({shortest(qos.max_hours)} h, {qos.max_gpus or '∞'} GPU)" for qos in machine.qos)
    if request.qos and fitting:
        return request.qos, phrase(
            "beyond the QoS", gpus=gpus, hours=shortest(hours), request=request, name=fitting[0], limits=limits
        )
    return request.qos, phrase("no QoS fits", gpus=gpus, hours=shortest(hours), machine=machine, limits=limits)


@dataclass(frozen=True, repr=False)
class Preview(Tabular):
    """Nodes, time and cost of a run on a machine, and the refusals it would get."""

    machine: Machine
    config: RunConfig
    allocation: NodeRequest
    fitting: tuple[str, ...]
    refusals: tuple[str, ...]

    @property
    def normalised_hours(self) -> float | None:
        """GPU-hours × the factor of the machine file; None where it gives none."""
        factor = self.machine.normalised_hour_factor
        return None if factor is None else self.allocation.gpu_hours * factor

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        allocation_fields = {name: value for name, value in vars(self.allocation).items() if name != "warning_s"}
        return {
            "machine": self.machine.name,
            "run": self.config.title,
            **allocation_fields,
            "gpu_hours": self.allocation.gpu_hours,
            "normalised_hours": self.normalised_hours,
            "fitting_qos": list(self.fitting),
            "refusals": list(self.refusals),
        }

    def table(self, *extra_rows: tuple[str, str]) -> Table:
        """Lay it out, names and values; further ones follow."""
        request, site = self.allocation, self.machine
        gpus = say(en="GPUs", fr="GPU") if site.device != "cpu" else say(en="places", fr="places")
        names = phrase.titles("columns of a job")
        values = (
            f"{site.name}: {title_words(site.title)}",
            self.config.title,
            say(
                en=f"{request.nodes} node{'s' if request.nodes > 1 else ''} × {request.ranks_per_node} ranks "
                f"({request.gpus} {gpus} billed)",
                fr=f"{request.nodes} nœud{'s' if request.nodes > 1 else ''} × {request.ranks_per_node} rangs "
                f"({request.gpus} {gpus} facturé{'s' if request.gpus > 1 else ''})",
            ),
            f"{request.minutes // 60} h {request.minutes % 60:02d} min",
            say(en=f"{significant(request.gpu_hours)} GPU-hours", fr=f"{significant(request.gpu_hours)} heures GPU"),
            "" if self.normalised_hours is None else f"{significant(self.normalised_hours)} h",
            f"{request.qos or '-'} ({', '.join(self.fitting) or '-'})" if site.qos else "",
            request.account,
            request.reservation,
            f"module load {site.torch_module}" if site.torch_module else "",
        )
        refused = ((say(en="refused", fr="refusé"), refusal) for refusal in self.refusals)
        return facts(*zip(names, values, strict=True), *refused, *extra_rows)


def preview(
    config: RunConfig,
    machine: str | None = None,
    *,
    account: str = "",
    qos: str = "",
    reservation: str = "",
    time_limit_s: float | None = None,
) -> Preview:
    """Preview what a run would take and cost on a machine; nothing is sent, and refusals are shown, not raised.

    Args:
        machine: name of a machine file; by default chosen as `dlojz.run` does.
        account, qos, reservation: by default what the machine file and the environment tell.
        time_limit_s: seconds, > 0; by default the machine file's.

    Raises:
        LabError: if the machine is unknown, or what is asked for is illegal in itself.
    """
    request = JobRequest(account=account, qos=qos, reservation=reservation, time_limit_s=time_limit_s)
    return preview_of(chosen(config, machine, request), config, request)


def preview_of(site: Machine, config: RunConfig, request: JobRequest) -> Preview:
    """Preview a request on a machine."""
    allocation, refusals = allocate(site, config, request)
    fitting = tuple(qos.name for qos in fitting_qos(site, allocation.minutes, allocation.gpus))
    return Preview(site, config, allocation, fitting, tuple(refusals))


def chosen(config: RunConfig, name: str | None, request: JobRequest) -> Machine:
    """Return the machine named, or the one that `clusters.choose` finds among those that would take the run.

    Raises:
        LabError: if none is named and several could be meant, or the one named is unknown.
    """

    def takes(machine_name: str) -> bool:
        try:
            return not allocate(named(machine_name), config, request)[1]  # [1]: the refusals
        except LabError:
            return False

    return choose(name, (machine_name for machine_name in machine_files() if takes(machine_name)))
