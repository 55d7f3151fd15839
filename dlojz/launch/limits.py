"""What a run will take of a cluster, and what the cluster would refuse: known before anything is sent.

Layer 5. Invariant: pure; every refusal is one sentence with what would work, and a job that would wait for ever (more
time than the partition gives, more nodes than it has: the scheduler accepts both) is refused here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import Field

from dlojz.config import RunConfig
from dlojz.launch.machines import NAME_PATTERN, Machine, Qos
from dlojz.schema import Contract, LabError, one_of
from dlojz.text import say

ACCOUNT_VARIABLE = "DLOJZ_ACCOUNT"
LONGEST_WARNING_S = 120
"""Seconds before the time limit at which the ranks are told to save and stop; less for a short job."""


class Request(Contract):
    """What may be asked of the scheduler besides the run itself."""

    account: str = Field("", pattern=rf"^$|{NAME_PATTERN}", description="whose hours are billed")
    qos: str = Field("", pattern=rf"^$|{NAME_PATTERN}", description="by default the first that fits")
    reservation: str = Field("", pattern=rf"^$|{NAME_PATTERN}", description="by default the machine file's")
    time_limit_s: float | None = Field(None, gt=0, description="by default the machine file's")
    requeues: int = Field(3, ge=0, le=20, description="how often a job stopped in time goes back to the queue")


@dataclass(frozen=True)
class Allocation:
    """What is asked for.

    Args:
        nodes, ranks_per_node: which multiply to the ranks.
        gpus: billed, those of whole nodes where nodes are not shared.
        minutes: time limit, which the scheduler counts in whole minutes.
        warning_s: seconds before the limit at which the ranks are told.
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
    machine: Machine, config: RunConfig, request: Request, environment: Mapping[str, str] | None = None
) -> tuple[Allocation, list[str]]:
    """What the run takes on this machine, and why it would be refused: one sentence each, none if it is taken."""
    environment = os.environ if environment is None else environment
    ranks, full = config.layout.world_size, machine.gpus_per_node
    nodes = math.ceil(ranks / full)
    gpus = nodes * full if machine.exclusive else ranks
    wanted_s = machine.default_minutes * 60 if request.time_limit_s is None else request.time_limit_s
    minutes = max(1, math.ceil(wanted_s / 60))
    account, no_account = _account(machine, request, environment)
    qos, no_qos = _qos(machine, request, minutes, gpus)
    allocation = Allocation(
        nodes=nodes,
        ranks_per_node=min(ranks, full),
        gpus=gpus,
        minutes=minutes,
        warning_s=min(LONGEST_WARNING_S, max(10, minutes * 60 // 5)),
        qos=qos,
        account=account,
        reservation=request.reservation or machine.reservation,
    )
    refusals = [_shape(machine, ranks), _size(machine, nodes, ranks), _device(machine, config), no_account, no_qos]
    return allocation, [refusal for refusal in refusals if refusal]


def admit(
    machine: Machine, config: RunConfig, request: Request, environment: Mapping[str, str] | None = None
) -> Allocation:
    """What the run takes on this machine.

    Raises:
        LabError: if the machine would refuse it, or let it wait for ever; all reasons are told.
    """
    allocation, refusals = allocate(machine, config, request, environment)
    if refusals:
        raise LabError(" ".join(refusals))
    return allocation


def fitting_qos(machine: Machine, minutes: int, gpus: int) -> list[Qos]:
    """The qualities of service whose limits a job keeps, in the order of the machine file."""
    return [one for one in machine.qos if minutes <= one.max_hours * 60 and gpus <= (one.max_gpus or gpus)]


def _shape(machine: Machine, ranks: int) -> str:
    full = machine.gpus_per_node
    if ranks <= full or ranks % full == 0:
        return ""
    below = ranks - ranks % full
    return say(
        en=f"{ranks} ranks do not fill whole nodes of {machine.name}, which have {full} GPUs: use at most {full}, or a "
        f"multiple of {full}, such as {below} or {below + full}.",
        fr=f"{ranks} rangs ne remplissent pas des nœuds entiers de {machine.name}, qui ont {full} GPU : prenez-en au "
        f"plus {full}, ou un multiple de {full}, par exemple {below} ou {below + full}.",
    )


def _size(machine: Machine, nodes: int, ranks: int) -> str:
    if nodes <= machine.max_nodes:
        return ""
    most = machine.max_nodes * machine.gpus_per_node
    return say(
        en=f"{ranks} ranks need {nodes} nodes, but {machine.name} gives {machine.max_nodes} at most, and the scheduler "
        f"would let the job wait for ever: use at most {most} ranks.",
        fr=f"{ranks} rangs demandent {nodes} nœuds, mais {machine.name} n’en donne que {machine.max_nodes} au plus, et "
        f"l’ordonnanceur laisserait le travail attendre sans fin : prenez au plus {most} rangs.",
    )


def _device(machine: Machine, config: RunConfig) -> str:
    if config.device == "cuda" and machine.device == "cpu":
        return say(
            en=f"device='cuda' was asked for, but the nodes of {machine.name} have no GPU that computes: use "
            "device='cpu', or another machine (`dlojz machines` lists them).",
            fr=f"device='cuda' a été demandé, mais les nœuds de {machine.name} n’ont pas de GPU qui calcule : prenez "
            "device='cpu', ou une autre machine (`dlojz machines` les liste).",
        )
    if config.device == "cpu" and machine.device != "cpu":
        return say(
            en=f"device='cpu' was asked for, but {machine.name} bills GPUs that would stand idle: use device='cuda', "
            "or on='local'.",
            fr=f"device='cpu' a été demandé, mais {machine.name} facture des GPU qui resteraient inactifs : prenez "
            "device='cuda', ou on='local'.",
        )
    return ""


def _account(machine: Machine, request: Request, environment: Mapping[str, str]) -> tuple[str, str]:
    """The account that is billed, and why it would be refused."""
    suffix = machine.account_suffix
    given = request.account or environment.get(ACCOUNT_VARIABLE, "")
    if not given and machine.account_variable and environment.get(machine.account_variable):
        given = environment[machine.account_variable].removesuffix(suffix) + suffix
    if given:
        try:
            Request(account=given)
        except LabError as error:
            return "", str(error)
    if given and not given.endswith(suffix):
        right = given.partition("@")[0] + suffix
        return given, say(
            en=f"the account {given!r} lacks the ending {suffix!r} by which {machine.name} tells its hours: use "
            f"account={right!r}.",
            fr=f"le compte {given!r} n’a pas la terminaison {suffix!r} qui désigne les heures de {machine.name} : "
            f"prenez account={right!r}.",
        )
    if not given and suffix:
        return "", say(
            en=f"{machine.name} bills its hours to an account, and none is known here: give account='PROJECT{suffix}', "
            f"or set ${ACCOUNT_VARIABLE}.",
            fr=f"{machine.name} facture ses heures à un compte, et aucun n’est connu ici : donnez "
            f"account='PROJET{suffix}', ou la variable ${ACCOUNT_VARIABLE}.",
        )
    return given, ""


def _qos(machine: Machine, request: Request, minutes: int, gpus: int) -> tuple[str, str]:
    """The quality of service asked for, and why the time or the size would be refused."""
    hours = minutes / 60
    names = {one.name: one for one in machine.qos}
    fitting = [one.name for one in fitting_qos(machine, minutes, gpus)]
    if request.qos and names and request.qos not in names:
        return request.qos, one_of("QoS", request.qos, names)
    if hours > machine.max_hours:
        return request.qos, say(
            en=f"{hours:g} h were asked for, but {machine.name} gives {machine.max_hours:g} h at most, and the "
            "scheduler would let the job wait for ever: ask for less; a run that reaches its limit saves and goes on.",
            fr=f"{hours:g} h ont été demandées, mais {machine.name} donne {machine.max_hours:g} h au plus, et "
            "l’ordonnanceur laisserait le travail attendre sans fin : demandez moins ; une exécution qui atteint sa "
            "limite se sauvegarde et peut reprendre.",
        )
    if not names or (request.qos and request.qos in fitting) or (fitting and not request.qos):
        return request.qos or (fitting[0] if fitting else ""), ""
    limits = ", ".join(f"{one.name} ({one.max_hours:g} h, {one.max_gpus or '∞'} GPU)" for one in machine.qos)
    if request.qos and fitting:
        return request.qos, say(
            en=f"{gpus} GPUs for {hours:g} h are beyond the QoS {request.qos!r}: use {fitting[0]!r} (there are "
            f"{limits}).",
            fr=f"{gpus} GPU pendant {hours:g} h dépassent la QoS {request.qos!r} : prenez {fitting[0]!r} (il y a "
            f"{limits}).",
        )
    return request.qos, say(
        en=f"{gpus} GPUs for {hours:g} h fit no QoS of {machine.name}: ask for less (there are {limits}).",
        fr=f"{gpus} GPU pendant {hours:g} h n’entrent dans aucune QoS de {machine.name} : demandez moins (il y a "
        f"{limits}).",
    )
