"""Why a layout is refused or slower, and the smallest change that would admit it.

Layer 4. Invariant: a verdict is made of the figures of the search and of one more estimate; it never runs another
search.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlojz.plan.candidate import Candidate, candidates_of, layouts_of
from dlojz.plan.change import Change, changes, code_of, lighter_neighbours, smallest_change
from dlojz.plan.cost_sentences import cost_sentence
from dlojz.plan.question import Question
from dlojz.plan.reason_sentences import reason_sentence
from dlojz.plan.reasons import decimal, part_words
from dlojz.plan.search import Found
from dlojz.predict.time import Parts, estimate
from dlojz.text import say


@dataclass(frozen=True)
class Verdict:
    """What the planner says of one layout.

    Attributes:
        candidate: the layout.
        reason: one of `dlojz.plan.reasons.NAMES`; empty if it is admitted.
        sentence: why, with its figures.
        change: the smallest one that would admit it; None if it is admitted, or nothing is.
        levers: for want of memory, what single changes would bring.
        rank: its place among the admitted, from 1; 0 if refused.
        step_s, memory_bytes: as estimated; nan where the layout has no meaning.
    """

    candidate: Candidate
    reason: str
    sentence: str
    change: Change | None
    levers: tuple[Change, ...]
    rank: int
    step_s: float
    memory_bytes: float

    @property
    def admitted(self) -> bool:
        """Whether a run can have it."""
        return not self.reason

    @property
    def in_one_line(self) -> str:
        """Layout, reason and smallest change."""
        colon = say(en=": ", fr=" : ")
        change = "" if self.change is None else f" → {self.change.words}"
        return self.candidate.title + colon + self.sentence + change

    def __str__(self) -> str:
        lines = [self.candidate.title, self.sentence]
        if self.change is not None:
            words = self.change.words
            lines.append(say(en=f"Smallest change: {words}.", fr=f"Plus petit changement : {words}."))
        lines += [f"  {_fits(one.fits)} {one.words}" for one in self.levers]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from dlojz.viz.markup import safe

        return "".join(f"<p>{safe(line)}</p>" for line in str(self).splitlines())

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        change = None if self.change is None else {"to": self.change.to.as_dict(), "words": self.change.words}
        return {
            "layout": self.candidate.as_dict(),
            "reason": self.reason,
            "sentence": self.sentence,
            "smallest_change": change,
            "levers": [{"words": one.words, "fits": one.fits} for one in self.levers],
            "rank": self.rank,
            "step_s": None if math.isnan(self.step_s) else self.step_s,
            "memory_bytes": None if math.isnan(self.memory_bytes) else self.memory_bytes,
        }


def _fits(yes: bool) -> str:
    return say(en="fits:", fr="suffit :") if yes else say(en="not enough:", fr="insuffisant :")


def refused(question: Question, found: Found, candidate: Candidate, reason: str, *, levers: bool = True) -> Verdict:
    """The verdict on a refused layout.

    Args:
        levers: whether single changes are tried too, which takes some milliseconds.
    """
    meaningful = reason in ("memory", "host", "hours")
    step = memory = math.nan
    sentence = reason_sentence(reason, question, candidate)
    if meaningful:
        layout = layouts_of([candidate], found.space)
        made = estimate(question.subject.workload, question.cluster, layout, question.calibration)
        step, memory = float(made.step_s[0]), float(made.memory_bytes[0])
        sentence = cost_sentence(question, found, candidate, reason, step, float(made.memory.host[0]))
    change = smallest_change(question, found, candidate, meaningful)
    tried: list[Change] = []
    if levers and reason == "memory":
        legal = [one for one in lighter_neighbours(question, candidate) if code_of(question, one) == ""]
        tried = sorted(changes(question, found, candidate, legal, True), key=lambda one: (not one.fits, one.step_s))
    return Verdict(candidate, reason, sentence, change, tuple(tried), 0, step, memory)


def admitted(question: Question, found: Found, place: int) -> Verdict:
    """The verdict on an admitted layout: its rank, and what makes it slower than the first."""
    candidate = candidates_of(found.space, found.admitted[place])[0]
    step = float(found.step_s[place])
    if place == 0:
        sentence = say(en="the fastest of all that fit.", fr="la plus rapide de toutes celles qui tiennent.")
    else:
        deltas = {
            name: float(getattr(found.parts, name)[place] - getattr(found.parts, name)[0])
            for name in Parts.__dataclass_fields__
        }
        worst = sorted(deltas, key=lambda name: -deltas[name])[:2]
        listed = ", ".join(f"{part_words(name)} +{decimal(deltas[name], 3)} s" for name in worst if deltas[name] > 0)
        percent = decimal(100 * (step / float(found.step_s[0]) - 1))
        sentence = say(
            en=f"fits; number {place + 1} of {found.admitted.size}, {percent} % slower than the first: {listed}.",
            fr=f"tient ; numéro {place + 1} sur {found.admitted.size}, {percent} % plus lente que la première : "
            f"{listed}.",
        )
    total = float(found.memory.total_bytes[place])
    return Verdict(candidate, "", sentence, None, (), place + 1, step, total)


def beside(found: Found, made: Found) -> Verdict:
    """The verdict on a layout that fits but has a value which the search does not try.

    Args:
        found: the search.
        made: a search of that value alone.
    """
    candidate = candidates_of(made.space, made.admitted[0])[0]
    step = float(made.step_s[0])
    rank = int(np.searchsorted(found.step_s, step)) + 1
    ratio = step / float(found.step_s[0])
    percent = decimal(100 * abs(ratio - 1))
    sentence = say(
        en=f"fits, with a value that the search does not try; it would be number {rank}, {percent} % "
        f"{'faster' if ratio < 1 else 'slower'} than the first.",
        fr=f"tient, avec une valeur que la recherche n’essaie pas ; elle serait numéro {rank}, {percent} % plus "
        f"{'rapide' if ratio < 1 else 'lente'} que la première.",
    )
    return Verdict(candidate, "", sentence, None, (), rank, step, float(made.memory.total_bytes[0]))
