"""From one layout to another: what one changes, and what that does to bytes and seconds.

Layer 4. Invariant: the smallest change is looked for among *all* admitted layouts: the fewest choices changed, then
the shortest step; it is never a guess.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dlojz.plan.candidate import FREE, Candidate, candidates_of, layouts_of
from dlojz.plan.question import Question
from dlojz.plan.reasons import gigabytes, more_percent
from dlojz.plan.search import Found
from dlojz.plan.space import REASONS, Integers, Space, contexts_of
from dlojz.predict.time import CHECKPOINTING, OFFLOAD, SCHEDULES, estimate
from dlojz.text import say


@dataclass(frozen=True)
class Change:
    """Another layout, by what one changes to get there.

    Attributes:
        to: the other layout.
        changed: name → (from, to).
        memory_delta_bytes: on the fullest GPU; nan where the first layout has no meaning.
        step_ratio: its step over the first one's (as if that one fitted); nan likewise.
        step_s: its step.
        fits: whether it is admitted.
    """

    to: Candidate
    changed: Mapping[str, tuple[Any, Any]]
    memory_delta_bytes: float
    step_ratio: float
    step_s: float
    fits: bool

    @property
    def words(self) -> str:
        """In one line: what changes, and what it does."""
        listed = ", ".join(f"{name} {before} → {after}" for name, (before, after) in self.changed.items())
        if math.isnan(self.step_ratio):
            return listed
        sign = "+" if self.memory_delta_bytes >= 0 else ""
        time = more_percent(self.step_ratio)
        return say(
            en=f"{listed}: {sign}{gigabytes(self.memory_delta_bytes)}, {time} time",
            fr=f"{listed} : {sign}{gigabytes(self.memory_delta_bytes)}, {time} de temps",
        )


def differences(space: Space, places: Integers, one: Candidate) -> Integers:
    """In how many choices each of some layouts differs from one; schedule and chunks are one choice."""
    columns = space.columns(places)
    legal = {"schedule": SCHEDULES, "checkpointing": CHECKPOINTING, "offload": OFFLOAD, "engine": space.names}
    unlike, order = np.zeros(len(places), np.int64), np.zeros(len(places), bool)
    for name in ("gpus", *FREE):
        value = getattr(one, name)
        here = (legal[name].index(value) if value in legal[name] else -1) if name in legal else value
        other = columns[name] != here
        if name in ("schedule", "chunks"):
            order |= other
        else:
            unlike += other
    return unlike + order


def unlikeness(found: Found, places: Integers) -> Integers:
    """In how many choices each of some layouts differs from the fastest admitted one."""
    return differences(found.space, places, candidates_of(found.space, found.admitted[0])[0])


def smallest_change(question: Question, found: Found, candidate: Candidate, meaningful: bool) -> Change | None:
    """The admitted layout that differs in the fewest choices; of these the fastest. None if nothing is admitted."""
    if not found.admitted.size:
        return None
    place = int(np.argmin(differences(found.space, found.admitted, candidate)))
    to = candidates_of(found.space, found.admitted[place])[0]
    return changes(question, found, candidate, [to], meaningful)[0]


def changes(
    question: Question, found: Found, candidate: Candidate, others: Sequence[Candidate], meaningful: bool
) -> list[Change]:
    """What each of some layouts would change."""
    if not others:
        return []
    layouts = layouts_of([candidate if meaningful else others[0], *others], found.space)
    made = estimate(question.subject.workload, question.cluster, layouts, question.calibration)
    step, total, host = made.step_s, made.memory_bytes, made.memory.host
    on_host = host * np.minimum(question.cluster.gpus_per_node, layouts.gpus) <= question.cluster.host_memory_bytes
    fits = made.fits & on_host & (step <= question.step_limit_s)
    unknown = 0.0 if meaningful else math.nan
    return [
        Change(
            other,
            candidate.changed_to(other),
            float(total[place] - total[0]) + unknown,
            float(step[place] / step[0]) + unknown,
            float(step[place]),
            bool(fits[place]),
        )
        for place, other in enumerate(others, start=1)
    ]


def lighter_neighbours(question: Question, one: Candidate) -> Iterator[Candidate]:
    """Layouts that differ in one choice which saves memory."""
    for kind in CHECKPOINTING[CHECKPOINTING.index(one.checkpointing) + 1 :]:
        yield replace(one, checkpointing=kind)
    if one.tp > 1 and not one.sequence_parallel:
        yield replace(one, sequence_parallel=True)
    for zero in range(one.zero + 1, 4):
        yield replace(one, zero=zero)
    if one.micro_batch > 1:
        half = one.micro_batch // 2
        yield replace(one, micro_batch=half, micro_batches=question.batch // (one.dp * half))
    if one.dp % 2 == 0:
        number = question.batch // (one.dp // 2 * one.micro_batch)
        yield replace(one, tp=2 * one.tp, dp=one.dp // 2, micro_batches=number)
        yield replace(one, pp=2 * one.pp, dp=one.dp // 2, micro_batches=number)
        if one.dp % (2 * one.ep) == 0 and max(1, question.subject.num_experts) % (2 * one.ep) == 0:
            yield replace(one, ep=2 * one.ep)
        if 2 * one.cp in contexts_of(question.subject, 2 * one.cp):
            yield replace(one, cp=2 * one.cp, dp=one.dp // 2, micro_batches=number)
    if one.offload == "none":
        yield replace(one, offload="optimizer")


def code_of(question: Question, one: Candidate) -> str:
    """The reason that is known of a layout without its bytes; empty if none."""
    names = {name: place for place, name in enumerate(question.engines)}
    given = {
        "tp": (one.tp,), "pp": (one.pp,), "cp": (one.cp,), "ep": (one.ep,),
        "micro_batch": (one.micro_batch,), "zero": (one.zero,),
        "engine": (names[one.engine],), "schedule": (SCHEDULES.index(one.schedule),), "chunks": (one.chunks,),
        "checkpointing": (CHECKPOINTING.index(one.checkpointing),), "offload": (OFFLOAD.index(one.offload),),
        "sequence_parallel": (int(one.sequence_parallel),),
    }  # fmt: skip
    codes = question.space(given, gpus=(one.gpus,)).codes
    return REASONS[int(codes.reshape(-1)[0])] if codes.size else "gpus"
