"""An admitted layout with its figures: seconds by part, bytes by rank, GPU-hours, energy, evidence, and an interval.

Layer 4. Invariant: the step is the simulated one where it was simulated, the closed form's else, and it says which;
no figure stands without its interval where held-out errors are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dlojz.config import RunConfig
from dlojz.plan.candidate import Candidate, candidates_of, layouts_of
from dlojz.plan.engines import OF_THE_LAB
from dlojz.plan.interval import HeldOut, held_out
from dlojz.plan.nearest import Evidence, closest
from dlojz.plan.question import Question
from dlojz.plan.ranks import RankMemory, rank_memories
from dlojz.plan.reasons import decimal, gigabytes, more_percent, part_words
from dlojz.plan.search import Found
from dlojz.predict.time import Bill, Simulation, bill
from dlojz.text import say

JOULES_PER_KWH = 3.6e6
MARGINAL = 0.94
"""Share of a GPU's memory from which a layout is called marginal: readings scatter by some percent."""


@dataclass(frozen=True, eq=False)
class Choice:
    """An admitted layout.

    Attributes:
        candidate: the layout.
        question: that it answers.
        place: among the admitted, from 0.
        estimated_s: seconds of a step in closed form.
        parts: seconds by part, which add up to it.
        memory: bytes on the fullest GPU by category.
        energy_j: of a step, all GPUs, in joules.
        simulation: the step played out; None if it was not.
        found: the search.
    """

    candidate: Candidate
    question: Question
    place: int
    estimated_s: float
    parts: Mapping[str, float]
    memory: Mapping[str, float]
    energy_j: float
    simulation: Simulation | None
    found: Found

    @property
    def step_s(self) -> float:
        """Seconds of a step: simulated where it was, else in closed form."""
        return self.estimated_s if self.simulation is None else self.simulation.step_s

    @property
    def held_out(self) -> HeldOut | None:
        """Errors of the calibration on rows it was not fitted on; None where none are known."""
        return held_out(self.question.calibration.name)

    @property
    def interval_s(self) -> tuple[float, float] | None:
        """Seconds between which four in five held-out rows would lie."""
        known = self.held_out
        return None if known is None else (self.step_s * known.low, self.step_s * known.high)

    @property
    def memory_bytes(self) -> float:
        """On the fullest GPU."""
        return sum(self.memory.values())

    @property
    def margin_bytes(self) -> float:
        """Memory of the GPU that stays free."""
        return self.question.device_bytes - self.memory_bytes

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of a step."""
        return self.candidate.gpus * self.step_s / 3600

    @property
    def energy_kwh(self) -> float:
        """Of a step, all GPUs."""
        return self.energy_j / JOULES_PER_KWH

    @property
    def samples_per_s(self) -> float:
        """Samples of all replicas together."""
        return self.candidate.global_batch / self.step_s

    @cached_property
    def ranks(self) -> list[RankMemory]:
        """Memory of a rank of every stage."""
        return rank_memories(self.question.subject, layouts_of([self.candidate], self.found.space))

    @cached_property
    def evidence(self) -> Evidence | None:
        """The closest measured row; None for an image model."""
        return closest(self.question, self.candidate)

    @property
    def time_words(self) -> str:
        """Seconds of a step with their interval."""
        text = f"{seconds(self.step_s)}"
        span = self.interval_s
        return text if span is None else f"{text} ({seconds(span[0])} – {seconds(span[1])})"

    @property
    def bill(self) -> Bill | None:
        """What the whole training takes, without failures and restarts; None where its steps are not known."""
        steps = self.question.steps
        return None if steps is None else bill(self.question.cluster, self.candidate.gpus, steps * self.step_s)

    def advice(self) -> list[str]:
        """What is no refusal, but what one should know."""
        one, told = self.candidate, []
        full = self.question.cluster.gpus_per_node
        if one.tp > full:
            told.append(
                say(
                    en=f"Tensor Parallelism over {one.tp} ranks crosses nodes of {full} GPUs.",
                    fr=f"le Tensor Parallelism sur {one.tp} rangs traverse des nœuds de {full} GPU.",
                )
            )
        if self.memory_bytes > MARGINAL * self.question.device_bytes:
            told.append(
                say(
                    en=f"marginal: only {gigabytes(self.margin_bytes)} stay free{self._roomier()}.",
                    fr=f"à la limite : il ne reste que {gigabytes(self.margin_bytes)} de libre{self._roomier()}.",
                )
            )
        bubble = self.parts["bubble"] / self.estimated_s
        if bubble > 0.2:
            told.append(
                say(
                    en=f"the pipeline waits {100 * bubble:.0f} % of the step: more micro-batches would help.",
                    fr=f"le pipeline attend {100 * bubble:.0f} % de l’itération : il faudrait plus de micro-batches.",
                )
            )
        return told

    def _roomier(self) -> str:
        """The fastest layout that is not marginal, as the rest of a sentence; empty if there is none."""
        total = self.found.memory.total_bytes
        roomy = np.flatnonzero(total <= MARGINAL * self.question.device_bytes)
        if not roomy.size:
            return ""
        place = int(roomy[0])
        title = candidates_of(self.found.space, self.found.admitted[place])[0].title
        free = gigabytes(self.question.device_bytes - float(total[place]))
        more = more_percent(float(self.found.step_s[place]) / self.estimated_s)
        return say(en=f"; {title}, leaves {free}, {more} time", fr=f" ; {title}, laisse {free}, {more} de temps")

    @property
    def is_run(self) -> bool:
        """Whether `dlojz.run` runs it: a model of the catalogue, an engine of the lab, no context parallelism, and
        experts shared out without ZeRO alone."""
        one = self.candidate
        runs = bool(self.question.subject.catalogue) and one.engine in OF_THE_LAB and one.cp == 1
        return runs and (one.ep == 1 or (one.zero == 0 and one.pp == 1))

    def config(self, **fields: Any) -> RunConfig:
        """The layout as a `RunConfig` that `dlojz.run` takes; see `dlojz.plan.emission.run_config`."""
        from dlojz.plan.emission import run_config

        return run_config(self, **fields)

    def documents(self) -> dict[str, str]:
        """The layout as files, by name; see `dlojz.plan.emission.documents`."""
        from dlojz.plan.emission import documents

        return documents(self)

    def lines(self) -> list[tuple[str, str]]:
        """What there is to say, as pairs of name and value."""
        largest = sorted(self.parts, key=lambda name: -self.parts[name])[:4]
        shares = ", ".join(f"{part_words(name)} {100 * self.parts[name] / self.estimated_s:.0f} %" for name in largest)
        how = say(en="closed form", fr="forme close") if self.simulation is None else say(en="simulated", fr="simulée")
        rows = [
            (say(en="layout", fr="configuration"), self.candidate.title),
            (say(en=f"step ({how})", fr=f"itération ({how})"), self.time_words),
            (say(en="of which", fr="dont"), shares),
            (
                say(en="memory of the fullest GPU", fr="mémoire du GPU le plus rempli"),
                f"{gigabytes(self.memory_bytes)} / {gigabytes(self.question.device_bytes)}",
            ),
            (say(en="GPU-hours of 1000 steps", fr="heures GPU de 1000 itérations"), decimal(1000 * self.gpu_hours, 1)),
            (
                say(en="energy of 1000 steps", fr="énergie de 1000 itérations"),
                f"{decimal(1000 * self.energy_kwh, 1)} kWh",
            ),
        ]
        if self.bill is not None:
            rows.append((say(en="whole training", fr="entraînement entier"), self._training_words(self.bill)))
        none = say(
            en="none: no image model is among the published measurements; the interval is that of decoders",
            fr="aucune : pas de modèle d’images parmi les mesures publiées ; l’intervalle est celui des décodeurs",
        )
        told = none if self.evidence is None else self.evidence.words
        if self.question.subject.num_experts:
            told = told.rstrip(".") + say(
                en="; no mixture of experts is among these measurements: the seconds of its exchanges and of its "
                "experts' products are not validated",
                fr=" ; aucun mélange d’experts parmi ces mesures : les secondes de ses échanges et des produits de ses "
                "experts ne sont pas validées",
            )
        rows.append((say(en="closest evidence", fr="mesure la plus proche"), told))
        rows += [(say(en="advice", fr="conseil"), one) for one in self.advice()]
        return rows

    def _training_words(self, account: Bill) -> str:
        days, hours, carbon = (
            decimal(account.days, 2),
            decimal(account.gpu_hours, 0),
            decimal(account.total_carbon_kg, 0),
        )
        return say(
            en=f"{self.question.steps} steps: {days} days, {hours} GPU-hours, {carbon} kg of CO₂ equivalent (with idle "
            "nodes and cooling)",
            fr=f"{self.question.steps} itérations : {days} jours, {hours} heures GPU, {carbon} kg équivalent CO₂ "
            "(nœuds inactifs et refroidissement compris)",
        )

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self.lines())

    def _repr_html_(self) -> str:
        from dlojz.viz.plan_tables import pairs_html

        return pairs_html(self.lines())

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "layout": self.candidate.as_dict(),
            "step_s": self.step_s,
            "estimated_s": self.estimated_s,
            "simulated": self.simulation is not None,
            "interval_s": self.interval_s,
            "parts_s": dict(self.parts),
            "memory_bytes": dict(self.memory),
            "fullest_bytes": self.memory_bytes,
            "margin_bytes": self.margin_bytes,
            "gpu_hours": self.gpu_hours,
            "energy_kwh": self.energy_kwh,
            "samples_per_s": self.samples_per_s,
            "training": None if self.bill is None else asdict(self.bill),
            "advice": self.advice(),
        }


def seconds(value: float) -> str:
    """Seconds with three significant digits, in s or ms, with the decimal mark of the reader's language."""
    scaled, unit = (value, "s") if value >= 1 else (1e3 * value, "ms")
    digits = 0 if scaled >= 100 else 1 if scaled >= 10 else 2
    return f"{decimal(scaled, digits)} {unit}"
