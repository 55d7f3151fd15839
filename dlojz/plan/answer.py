"""The answer to a question: the best layout, those that compete with it, and all that are refused with the reason.

Layer 4. Invariant: every layout of the space is either admitted or refused for one reason of the closed list; asking
for any one of them by name tells which.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from dlojz.plan.candidate import Candidate, candidates_of
from dlojz.plan.change import unlikeness
from dlojz.plan.choice import Choice
from dlojz.plan.explain import Verdict, refused
from dlojz.plan.question import Question
from dlojz.plan.ranks import PARTS
from dlojz.plan.reasons import decimal, gigabytes, reason_words
from dlojz.plan.search import Found, front_of
from dlojz.plan.space import CODE, REASONS
from dlojz.plan.tree import Tree, tree_of
from dlojz.plan.why import matching, verdict_of
from dlojz.predict.time import Parts, Simulation
from dlojz.schema import LabError, one_of
from dlojz.text import say

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dlojz.viz.canvas import LabFigure


@dataclass(frozen=True, eq=False)
class Refused(Sequence[Verdict]):
    """All refused layouts; each verdict is made when it is looked at.

    Attributes:
        question: that was asked.
        found: the search.
        places: flat places of the refused layouts.
    """

    question: Question
    found: Found
    places: np.ndarray[Any, Any]

    @property
    def counts(self) -> dict[str, int]:
        """How many layouts each reason refuses; only reasons that occur."""
        found = np.bincount(self.found.codes.reshape(-1)[self.places], minlength=len(REASONS))
        return {name: int(found[code]) for name, code in CODE.items() if found[code]}

    def by(self, reason: str) -> Refused:
        """Those that one reason refuses.

        Raises:
            LabError: for an unknown reason.
        """
        if reason not in CODE or CODE[reason] <= CODE["same"]:
            raise LabError(one_of("reason", reason, REASONS[2:]))
        codes = self.found.codes.reshape(-1)[self.places]
        return Refused(self.question, self.found, self.places[codes == CODE[reason]])

    def nearest(self) -> Verdict:
        """The one that is most like the fastest admitted layout.

        Raises:
            LabError: if there is none.
        """
        if not len(self):
            raise LabError(
                say(
                    en="no layout is refused for this reason.",
                    fr="aucune configuration n’est refusée pour cette raison.",
                )
            )
        return self[int(np.argmin(unlikeness(self.found, self.places)))]

    def __len__(self) -> int:
        return int(self.places.size)

    @overload
    def __getitem__(self, index: int) -> Verdict: ...
    @overload
    def __getitem__(self, index: slice) -> Refused: ...
    def __getitem__(self, index: int | slice) -> Verdict | Refused:
        if isinstance(index, slice):
            return Refused(self.question, self.found, self.places[index])
        place = self.places[index]
        reason = REASONS[int(self.found.codes.reshape(-1)[place])]
        return refused(self.question, self.found, candidates_of(self.found.space, place)[0], reason)

    def __iter__(self) -> Iterator[Verdict]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return "\n".join(f"{number:>9}  {reason_words(name)}" for name, number in self.counts.items())


@dataclass(frozen=True, eq=False)
class Plan:
    """What `dlojz.plan` answers.

    Attributes:
        question: that was asked.
        found: the search: every layout with its code, the admitted ones in order.
        simulations: of the fastest ones, by place.
    """

    question: Question
    found: Found
    simulations: Mapping[int, Simulation]

    def choice(self, place: int) -> Choice:
        """The admitted layout of a place, from 0, in order of the closed form's seconds."""
        found = self.found
        return Choice(
            candidates_of(found.space, found.admitted[place])[0],
            self.question,
            int(place),
            float(found.step_s[place]),
            {one.name: float(getattr(found.parts, one.name)[place]) for one in fields(Parts)},
            {name: float(getattr(found.memory, name)[place]) for name in PARTS},
            float(found.energy_j[place]),
            self.simulations.get(int(place)),
            found,
        )

    @cached_property
    def top(self) -> tuple[Choice, ...]:
        """The layouts that were played out, fastest first."""
        return tuple(sorted((self.choice(place) for place in self.simulations), key=lambda one: one.step_s))

    @property
    def best(self) -> Choice:
        """The fastest layout that fits, by simulation."""
        return self.top[0] if self.top else self.choice(0)

    @cached_property
    def pareto(self) -> tuple[Choice, ...]:
        """Layouts that no other beats in step time, GPU-hours, energy and free memory all at once, fastest first."""
        return tuple(self.choice(int(place)) for place in front_of(self.found, self.question.device_bytes))

    @property
    def refused(self) -> Refused:
        """All refused layouts."""
        return Refused(self.question, self.found, np.flatnonzero(self.found.codes.reshape(-1) > CODE["same"]))

    @property
    def tree(self) -> Tree:
        """Which strategy when: the decision tree of the course, computed for this question."""
        return tree_of(self.question, self.found)

    def why(self, **fields: Any) -> Verdict:
        """Why a layout is refused, or how far it is from the best.

        Args:
            **fields: of `Candidate`: dp, tp, pp, cp, zero, micro_batch, schedule, chunks, checkpointing,
                sequence_parallel, offload, engine, gpus. What is left out is chosen as well as can be.

        Raises:
            LabError: for an unknown field or an illegal value.

        Example:
            `plan.why(dp=4, tp=8, pp=12, checkpointing="none")`
        """
        return verdict_of(self.question, self.found, fields)

    def choose(self, **fields: Any) -> Choice:
        """The fastest admitted layout with these values.

        Raises:
            LabError: if none is admitted; the sentence says why.
        """
        places = matching(self.found, self.found.admitted, fields)
        if not places.size:
            raise LabError(self.why(**fields).in_one_line)
        return self.choice(int(places[0]))

    def lines(self) -> list[tuple[str, str]]:
        """What there is to say, as pairs of name and value."""
        question, found = self.question, self.found
        gpus = say(en=" or ", fr=" ou ").join(map(str, question.gpus))
        size = f"{decimal(question.subject.num_parameters / 1e9, 2)} × 10⁹"
        counts = self.refused.counts
        layouts, fit, out = (
            decimal(one, 0) for one in (found.num_layouts, found.admitted.size, found.num_layouts - found.admitted.size)
        )
        return [
            (
                say(en="question", fr="question"),
                say(
                    en=f"{question.subject.name} ({size} parameters) on {gpus} GPUs of {question.cluster.title}, batch "
                    f"{question.batch}, {question.precision}",
                    fr=f"{question.subject.name} ({size} paramètres) sur {gpus} GPU de {question.cluster.title}, batch "
                    f"{question.batch}, {question.precision}",
                ),
            ),
            (
                say(en="searched", fr="cherché"),
                say(
                    en=f"{layouts} layouts: {fit} admitted, {out} refused, {len(self.simulations)} simulated",
                    fr=f"{layouts} configurations : {fit} admises, {out} refusées, {len(self.simulations)} simulées",
                ),
            ),
            *self.best.lines(),
            *((reason_words(name), decimal(number, 0)) for name, number in counts.items()),
        ]

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self.lines())

    def _repr_html_(self) -> str:
        from dlojz.viz.plan_tables import plan_html

        return plan_html(self)

    def table(self, most: int = 12) -> RenderableType:
        """The best layouts, the Pareto front and the refusals, for a terminal.

        Args:
            most: lines of each part.
        """
        from dlojz.viz.plan_tables import plan_table

        return plan_table(self, most)

    def figure(self, path: str | Path | None = None) -> LabFigure:
        """Pareto front, memory of every rank, waterfall of the step, refusals by reason.

        Raises:
            LabError: if the picture cannot be written.
        """
        from dlojz.viz.plan_figure import plan_figure

        return plan_figure(self, path)

    def as_dict(self, most: int = 12) -> dict[str, Any]:
        """Plain data, for JSON.

        Args:
            most: layouts of each list.
        """
        question, best = self.question, self.best
        evidence = best.evidence
        return {
            "model": question.subject.name,
            "parameters": question.subject.num_parameters,
            "cluster": question.cluster.name,
            "gpus": list(question.gpus),
            "batch": question.batch,
            "precision": question.precision,
            "calibration": question.calibration.name,
            "layouts": self.found.num_layouts,
            "admitted": int(self.found.admitted.size),
            "refused": self.refused.counts,
            "best": best.as_dict()
            | {
                "ranks": [
                    {"stage": one.stage, "layers": one.layers, "in_flight": one.in_flight, "bytes": one.parts}
                    for one in best.ranks
                ],
                "closest_evidence": None if evidence is None else evidence.as_dict(),
                "documents": best.documents(),
            },
            "top": [one.as_dict() for one in self.top[:most]],
            "pareto": [one.as_dict() for one in self.pareto[:most]],
            "tree": self.tree.as_dict(),
        }


__all__ = ["Candidate", "Choice", "Plan", "Refused", "Verdict", "gigabytes"]
