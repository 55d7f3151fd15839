"""The cost of a run on a cluster, shown before it is sent.

Layer 5. Invariant: nothing is asked of the scheduler and nothing is written; a preview shows refusals, and raises
none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dlojz.config import RunConfig
from dlojz.launch.limits import Allocation, Request, allocate, fitting_qos
from dlojz.launch.machines import Machine, choose, machine_files
from dlojz.launch.machines import machine as named
from dlojz.schema import LabError
from dlojz.text import say


@dataclass(frozen=True)
class Preview:
    """What a run would take and cost, and why it would be refused (nothing, where `refusals` is empty)."""

    machine: Machine
    config: RunConfig
    allocation: Allocation
    fitting: tuple[str, ...]
    refusals: tuple[str, ...]

    @property
    def normalised_hours(self) -> float | None:
        """GPU-hours × the factor of the machine file; None where it gives none."""
        factor = self.machine.normalised_hour_factor
        return None if factor is None else self.allocation.gpu_hours * factor

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        asked = self.allocation
        return {
            "machine": self.machine.name,
            "run": self.config.title,
            "nodes": asked.nodes,
            "ranks_per_node": asked.ranks_per_node,
            "gpus": asked.gpus,
            "minutes": asked.minutes,
            "gpu_hours": asked.gpu_hours,
            "normalised_hours": self.normalised_hours,
            "qos": asked.qos,
            "fitting_qos": list(self.fitting),
            "account": asked.account,
            "reservation": asked.reservation,
            "refusals": list(self.refusals),
        }

    def lines(self) -> list[tuple[str, str]]:
        """What there is to say, as pairs of name and value."""
        asked, site = self.allocation, self.machine
        gpus = say(en="GPUs", fr="GPU") if site.device != "cpu" else say(en="places", fr="places")
        lines = [
            (say(en="machine", fr="machine"), f"{site.name}: {site.title}"),
            (say(en="run", fr="exécution"), self.config.title),
            (
                say(en="asks for", fr="demande"),
                say(
                    en=f"{asked.nodes} node{'s' if asked.nodes > 1 else ''} × {asked.ranks_per_node} ranks "
                    f"({asked.gpus} {gpus} billed)",
                    fr=f"{asked.nodes} nœud{'s' if asked.nodes > 1 else ''} × {asked.ranks_per_node} rangs "
                    f"({asked.gpus} {gpus} facturé{'s' if asked.gpus > 1 else ''})",
                ),
            ),
            (say(en="time limit", fr="limite de temps"), f"{asked.minutes // 60} h {asked.minutes % 60:02d} min"),
            (
                say(en="costs at most", fr="coûte au plus"),
                say(en=f"{asked.gpu_hours:.3g} GPU-hours", fr=f"{asked.gpu_hours:.3g} heures GPU"),
            ),
        ]
        if self.normalised_hours is not None:
            lines.append((say(en="normalised", fr="normalisées"), f"{self.normalised_hours:.3g} h"))
        if site.qos:
            lines.append(("QoS", f"{asked.qos or '-'} ({', '.join(self.fitting) or '-'})"))
        if asked.account:
            lines.append((say(en="account", fr="compte"), asked.account))
        if asked.reservation:
            lines.append((say(en="reservation", fr="réservation"), asked.reservation))
        lines += [(say(en="refused", fr="refusé"), refusal) for refusal in self.refusals]
        return lines

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self.lines())

    def _repr_html_(self) -> str:
        from dlojz.viz.markup import safe

        rows = "".join(
            f"<tr><th style='text-align:left'>{safe(name)}</th><td style='text-align:left'>{safe(value)}</td></tr>"
            for name, value in self.lines()
        )
        return f"<table>{rows}</table>"


def preview(
    config: RunConfig,
    machine: str | None = None,
    *,
    account: str = "",
    qos: str = "",
    reservation: str = "",
    time_limit_s: float | None = None,
) -> Preview:
    """What a run would take and cost on a machine; nothing is sent.

    Args:
        machine: name of a machine file; by default chosen as `dlojz.run` does.
        account, qos, reservation: by default what the machine file and the environment tell.
        time_limit_s: seconds, > 0; by default the machine file's.

    Raises:
        LabError: if the machine is unknown, or what is asked for is illegal in itself.
    """
    request = Request(account=account, qos=qos, reservation=reservation, time_limit_s=time_limit_s)
    return preview_of(chosen(config, machine, request), config, request)


def preview_of(site: Machine, config: RunConfig, request: Request) -> Preview:
    """The preview of a request on a machine."""
    allocation, refusals = allocate(site, config, request)
    fitting = tuple(one.name for one in fitting_qos(site, allocation.minutes, allocation.gpus))
    return Preview(site, config, allocation, fitting, tuple(refusals))


def chosen(config: RunConfig, name: str | None, request: Request) -> Machine:
    """The machine named, or the one that `machines.choose` finds, among those that would take the run.

    Raises:
        LabError: if none is named and several could be meant, or the one named is unknown.
    """

    def takes(one: str) -> bool:
        try:
            return not allocate(named(one), config, request)[1]
        except LabError:
            return False

    return choose(name, (one for one in machine_files() if takes(one)))
