"""What is predicted of a point before it is run: memory, messages, cost, and why its machine would not take it.

Layer 6. Invariant: nothing is started, nobody is asked; what is told is of the heaviest rank.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from dlojz import hardware
from dlojz.campaign.plan import Point
from dlojz.footprint import Memory
from dlojz.hardware import Device
from dlojz.schema import LabError
from dlojz.text import say

Asked = Mapping[str, str]
"""Of the scheduler: `account`, `qos` and `reservation`, as far as they are given."""
NOTHING: Asked = MappingProxyType({})
MAX_SHOWN = 80
"""Characters of a refused name that are shown."""


@dataclass(frozen=True)
class Outlook:
    """What is predicted of a point.

    Args:
        rank: the one that takes most memory.
        memory: of that rank; None where it cannot be predicted.
        limit_bytes: what such a rank may take there; None where it is not known.
        communication_bytes: messages of rank 0 in one step.
        limit_name: whose limit that is.
        most_hours: what the point can cost at most: GPU-hours billed by its machine, or ranks × time limit here; None
            without a time limit.
        normalised_hours: the same as the site counts them, where it does.
        refusals: why its machine would not take it.
        note: why something is not predicted.
    """

    rank: int = 0
    memory: Memory | None = None
    limit_bytes: int | None = None
    communication_bytes: int | None = None
    limit_name: str = ""
    most_hours: float | None = None
    normalised_hours: float | None = None
    refusals: tuple[str, ...] = ()
    note: str = ""

    @property
    def taken_bytes(self) -> int | None:
        """What the rank takes: of a GPU as nvidia-smi shows it, of a CPU the largest sum of its tensors."""
        return taken_of(self.memory)

    @property
    def fits(self) -> bool | None:
        """Whether it stays within the limit; None where one is not known."""
        if self.taken_bytes is None or self.limit_bytes is None:
            return None
        return self.taken_bytes <= self.limit_bytes


def taken_of(memory: Memory | None) -> int | None:
    """What a rank takes of its device, or where that is not known the largest sum of its tensors."""
    if memory is None:
        return None
    return memory.peak_bytes if memory.device_bytes is None else memory.device_bytes


def outlook(point: Point, time_limit_s: float | None, asked: Asked = NOTHING) -> Outlook:
    """Predict one point; what cannot be predicted is told in the note.

    Args:
        time_limit_s: of its run, > 0.
        asked: of the scheduler.

    Raises:
        LabError: if there is no machine file of that name, or it is not legal.
    """
    from dlojz.predict.communication import predict_communication
    from dlojz.predict.forecast import heaviest
    from dlojz.predict.shapes import model_shapes

    known, device = _place(point, time_limit_s, asked)
    try:
        told = heaviest(point.config, device)
        traffic = predict_communication(point.config, model_shapes(point.config), 0)
    except LabError as error:
        return replace(known, note=str(error))
    sent = sum(each.message_bytes for each in traffic if each.group != "control")
    return replace(known, rank=told.rank, memory=told.memory, communication_bytes=sent)


def _place(point: Point, time_limit_s: float | None, asked: Asked) -> tuple[Outlook, Device | None]:
    """What is known of where a point runs, and its GPU; None for a CPU."""
    ranks = point.config.layout.world_size
    if not point.machine:
        from dlojz.train.host import rank_limit_bytes

        name = say(en=f"this machine's share, {ranks} ranks", fr=f"part de cette machine, {ranks} rangs")
        hours = time_limit_s and ranks * time_limit_s / 3600
        return Outlook(limit_bytes=rank_limit_bytes(ranks), limit_name=name, most_hours=hours), None
    from dlojz.launch.limits import Request, allocate
    from dlojz.launch.machines import machine

    site = machine(point.machine)
    named = {option: _named(option, value) for option, value in asked.items() if option != "account"}
    told = {**named, "account": account_of(point.machine, asked)}
    granted, refusals = allocate(site, point.config, Request(time_limit_s=time_limit_s, **told))
    factor = site.normalised_hour_factor
    gpu = None if site.device == "cpu" else hardware.device(site.device)
    known = Outlook(
        limit_bytes=gpu.memory_bytes if gpu else None,
        limit_name=gpu.title if gpu else site.name,
        most_hours=granted.gpu_hours,
        normalised_hours=None if factor is None else granted.gpu_hours * factor,
        refusals=tuple(refusals),
    )
    return known, gpu


def account_of(machine_name: str, asked: Asked) -> str:
    """Whose hours a machine bills: a project without an ending gets that of the machine, so that one serves them all.

    Args:
        asked: its `account`, else `$DLOJZ_ACCOUNT`; empty where neither tells one.

    Raises:
        LabError: if there is no machine file of that name, or it is not legal, or no account can have that name.
    """
    from dlojz.launch.limits import ACCOUNT_VARIABLE
    from dlojz.launch.machines import machine

    given = asked.get("account") or os.environ.get(ACCOUNT_VARIABLE, "")
    ending = "" if not given or "@" in given else machine(machine_name).account_suffix
    return _named("account", given, ending)


def _named(option: str, name: str, ending: str = "") -> str:
    """What is asked of the scheduler, if it can be the name of such a thing: it is written into a job script."""
    from dlojz.launch.limits import ACCOUNT_VARIABLE
    from dlojz.launch.machines import NAME_PATTERN

    if not name or re.fullmatch(NAME_PATTERN, name + ending):
        return name + ending
    shown = name if len(name) <= MAX_SHOWN else f"{name[:MAX_SHOWN]}…"
    correct = f"--{option}" + (say(en=" or $", fr=" ou $") + ACCOUNT_VARIABLE if option == "account" else "")
    raise LabError(
        say(
            en=f"{option} is a name that the scheduler knows, of at most 64 letters, digits and '_.@+-' (a letter, a "
            f"digit or '_' first), but {shown!r} was received: correct {correct}.",
            fr=f"{option} est un nom connu de l’ordonnanceur, d’au plus 64 lettres, chiffres et « _.@+- » (au début, "
            f"une lettre, un chiffre ou « _ »), mais {shown!r} a été reçu : corrigez {correct}.",
        )
    )


def root_of(root: Path, machine: str) -> Path:
    """Where the runs of a machine are kept: a folder of its own, as the same run elsewhere measures something else."""
    return root / f"on-{machine}" if machine else root
