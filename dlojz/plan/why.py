"""A layout asked for by name: which one is meant, and what the planner says of it.

Layer 4. Invariant: what is left out is chosen as well as can be: the fastest admitted layout with the values given; if
none is admitted, of the refused ones the one that got furthest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from dlojz.plan.candidate import Candidate, candidates_of
from dlojz.plan.change import differences
from dlojz.plan.engines import OFFERS
from dlojz.plan.explain import Verdict, admitted, beside, refused
from dlojz.plan.question import MOST_BATCH, MOST_GPUS, Question, whole
from dlojz.plan.search import Found, search
from dlojz.plan.space import CODE, REASONS, Integers, contexts_of
from dlojz.predict.time import CHECKPOINTING, OFFLOAD, SCHEDULES
from dlojz.schema import LabError, one_of
from dlojz.text import say

_WORDS: Final = {"schedule": SCHEDULES, "checkpointing": CHECKPOINTING, "offload": OFFLOAD}
_MOST: Final = {
    "gpus": MOST_GPUS,
    "dp": MOST_GPUS,
    "tp": MOST_GPUS,
    "pp": MOST_GPUS,
    "cp": MOST_GPUS,
    "ep": MOST_GPUS,
    "micro_batch": MOST_BATCH,
    "chunks": 1024,
}
FIELDS: Final = ("gpus", "dp", "tp", "pp", "cp", "ep", "zero", "micro_batch", "schedule", "chunks", "checkpointing",
                 "sequence_parallel", "offload", "engine")  # fmt: skip
"""By which a layout is asked for."""


def checked(fields: Mapping[str, Any], names: Sequence[str]) -> dict[str, int]:
    """Fields as the columns of a space have them.

    Args:
        names: of the engines of that space.

    Raises:
        LabError: for an unknown field, word or number.
    """
    found: dict[str, int] = {}
    for name, value in fields.items():
        if name not in FIELDS:
            raise LabError(one_of("field", name, FIELDS))
        if name in _WORDS or name == "engine":
            legal = names if name == "engine" else _WORDS[name]
            if value not in legal:
                raise LabError(one_of(name, value, legal))
            found[name] = legal.index(value)
        elif name == "sequence_parallel":
            if value not in (True, False):
                raise LabError(one_of(name, value, ("True", "False")))
            found[name] = int(value)
        elif name == "zero":
            if isinstance(value, bool) or value not in (0, 1, 2, 3):
                raise LabError(one_of(name, value, ("0", "1", "2", "3")))
            found[name] = int(value)
        else:
            found[name] = whole(name, value, _MOST[name])
    return found


def matching(found: Found, places: Integers, fields: Mapping[str, Any]) -> Integers:
    """Which of some layouts have these values: their places in `places`, in order."""
    wanted = checked(fields, found.space.names)
    columns = found.space.columns(places)
    same = np.ones(places.size, bool)
    for name, value in wanted.items():
        same &= columns[name] == value
    return np.flatnonzero(same)


def verdict_of(question: Question, found: Found, fields: Mapping[str, Any]) -> Verdict:
    """What the planner says of the layout that some fields ask for.

    Raises:
        LabError: for an unknown field or an illegal value.
    """
    if fields.get("engine") in OFFERS and fields["engine"] not in question.engines:
        question = replace(question, engines=(*question.engines, fields["engine"]))
    wanted = checked(fields, question.engines)
    mismatch = _no_such_degrees(question, wanted)
    if mismatch is not None:
        return refused(question, found, mismatch, "gpus", levers=False)
    places = matching(found, found.admitted, fields) if question.engines == found.space.names else np.array([], int)
    if places.size:
        return admitted(question, found, int(places[0]))
    given = {name: (value,) for name, value in wanted.items() if name != "gpus"}
    space = question.space(given, gpus=(wanted["gpus"],) if "gpus" in wanted else None)
    made = search(space, question.cluster, question.calibration, step_limit_s=question.step_limit_s)
    if made.admitted.size:  # with a value that the search does not try, a micro-batch of 5 say
        return beside(found, made)
    one, reason = _furthest(made, found)
    return refused(question, found, one, reason)


def _no_such_degrees(question: Question, wanted: Mapping[str, int]) -> Candidate | None:
    """The layout asked for, if its degrees do not come to the GPUs of the question; None if they do."""
    degrees = {name: wanted[name] for name in ("dp", "tp", "pp", "cp") if name in wanted}
    product = int(np.prod([*degrees.values(), 1]))
    numbers = [wanted["gpus"]] if "gpus" in wanted else list(question.gpus)
    over = [number // product for number in numbers if number % product == 0]
    if {"dp", "tp", "pp"} <= set(degrees):  # what is left over is cp, where that was not given and is searched
        over = [one for one in over if one in ([1] if "cp" in degrees else contexts_of(question.subject, one))]
    if over:
        return None
    dp, tp, pp, cp = (degrees.get(name, 1) for name in ("dp", "tp", "pp", "cp"))
    size = wanted.get("micro_batch", 1)
    return Candidate(
        numbers[0], dp, tp, pp, wanted.get("zero", 0), size,
        question.batch // (dp * size), SCHEDULES[wanted.get("schedule", 0)], wanted.get("chunks", 1),
        CHECKPOINTING[wanted.get("checkpointing", 0)], bool(wanted.get("sequence_parallel", 0)),
        OFFLOAD[wanted.get("offload", 0)], question.engines[wanted.get("engine", 0)], cp,
        wanted.get("ep", 1),
    )  # fmt: skip


def _furthest(made: Found, found: Found) -> tuple[Candidate, str]:
    """Of layouts of which none is admitted, one whose reason comes last: for bytes the lightest, else the most like the
    fastest admitted layout.
    """
    codes, space = made.codes.reshape(-1), made.space
    if not codes.size:
        raise LabError(
            say(
                en="no layout has these values together: an interleaved schedule has 2 chunks or more, others have 1.",
                fr="aucune configuration n’a ces valeurs ensemble : un ordonnancement interleaved a au moins 2 "
                "chunks, tout autre en a 1.",
            )
        )
    told = codes[codes != CODE["same"]]
    code = int(told.max()) if told.size else CODE["same"]
    places = np.flatnonzero(codes == code)
    if code == CODE["memory"]:
        light = made.heavy_bytes[np.isin(made.heavy, places)]
        places = made.heavy[np.isin(made.heavy, places)][np.argsort(light, kind="stable")]
    else:
        best = candidates_of(found.space, found.admitted[0])[0]
        places = places[np.argsort(differences(space, places, best), kind="stable")]
    return candidates_of(space, places[0])[0], REASONS[code]
