"""Tables of lab 08 about searches and proofs: programmes, stages, paired rounds, held-out rows, files of a choice.

Layer 6 (labs). Invariant: nothing is typed in; an exercise that is still to do is answered by its sentence.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dlojz.evidence import flops_per_sequence
from dlojz.labs.compromise_answers import written
from dlojz.labs.compromise_error_exercises import Row
from dlojz.labs.compromise_programme import perceptron, solve
from dlojz.labs.compromise_stage_exercises import KNOWN, Stages, plan_of
from dlojz.labs.pipeline_figures import Sheet, or_to_do, percent
from dlojz.plan.alpa.examples import mlp
from dlojz.plan.alpa.intra_operator import shard
from dlojz.plan.alpa.mesh import DeviceMesh
from dlojz.plan.choice import seconds
from dlojz.plan.here import LocalChoice
from dlojz.plan.reasons import decimal
from dlojz.plan.validation import validate
from dlojz.record import RunRecord
from dlojz.text import say
from dlojz.units import format_bytes

Answer = Callable[..., Any]
STRATEGY = {"column": ("C", "C"), "row": ("R", "L"), "batch": ("B", "B")}
LIKELY = 0.05
"""p from which a difference is called chance."""


@or_to_do
def by_batch(programme: Answer, batches: Iterable[int], width: int, layers: int, mesh: DeviceMesh) -> Sheet:
    """The cheapest sharding of a perceptron for several batches: the student's chain, and the whole graph."""
    rows = []
    for batch in batches:
        chain = perceptron(batch, width, layers, mesh)
        found = solve(*programme(chain.costs, chain.resharding))
        letters = [] if found is None else [STRATEGY[chain.strategies[k]] for k in found.strategies()]
        rows.append(
            (
                str(batch),
                " ".join(say(en=english, fr=french) for english, french in letters),
                "—" if found is None else decimal(found.cost, 0),
                decimal(shard(mlp(batch, width, layers), mesh).cost, 0),
            )
        )
    head = (
        "batch",
        say(en="strategies (C columns, R rows, B batch)", fr="stratégies (C colonnes, L lignes, B batch)"),
        say(en="your programme", fr="votre programme"),
        say(en="the package, operator by operator", fr="le paquet, opérateur par opérateur"),
    )
    return Sheet(head, tuple(rows))


@or_to_do
def known_steps(shortest_step: Answer) -> Sheet:
    """The six known cases: the student's shortest step, the package's, and the stages of its plan."""
    rows = []
    for name, (times, gpus, micro_batches) in KNOWN.items():
        own = shortest_step(times, times.layers, gpus, micro_batches)
        plan = plan_of(times, times.layers, gpus, micro_batches)
        cut = "  ".join(f"{one.first}–{one.last} × {one.submesh.num_devices}" for one in plan.stages)
        work = ", ".join(f"{weight:g}" for weight in times.work)
        efficiency = " ".join(decimal(one, 2) for one in times.efficiency)
        both = f"{written(own)} | {written(plan.step_s)}"
        rows.append((name, f"[{work}]", efficiency, str(gpus), str(micro_batches), both, cut))
    head = (
        say(en="case", fr="cas"),
        say(en="work", fr="travail"),
        say(en="efficiency of 1, 2, 4… GPUs", fr="efficacité de 1, 2, 4… GPU"),
        "GPU",
        "B",
        say(en="yours | the package", fr="vous | le paquet"),
        say(en="stages: layers × GPUs", fr="étages : couches × GPU"),
    )
    return Sheet(head, tuple(rows))


def case(name: str) -> tuple[Stages, int, int]:
    """A known case: times, GPUs, micro-batches."""
    return KNOWN[name]


def stage_times(times: Stages, gpus: int) -> dict[tuple[int, int, int], float]:
    """Times of all stages of a case, by first layer, last layer and GPUs."""
    sizes = [2**power for power in range(gpus.bit_length())]
    layers = range(times.layers)
    return {
        (first, last, size): times(first, last, size)
        for first in layers
        for last in layers
        for size in sizes
        if first <= last
    }


@or_to_do
def duels(compare_rounds: Answer, rows: Sequence[LocalChoice], rounds: Sequence[Sequence[float]]) -> Sheet:
    """The first layout against each other one, by the student's comparison of their rounds."""
    lines = []
    for row, own in list(zip(rows, rounds, strict=True))[1:]:
        ratio, p = compare_rounds(rounds[0], own)
        if p > LIKELY:
            verdict = say(en="cannot be told", fr="rien ne permet de le dire")
        elif ratio > 1:
            verdict = say(en="the first is faster", fr="la première est plus rapide")
        else:
            verdict = say(en="the first is slower", fr="la première est plus lente")
        lines.append((row.title, decimal(row.step_s / rows[0].step_s, 2), decimal(ratio, 2), decimal(p, 4), verdict))
    head = (
        say(en=f"against {rows[0].title}", fr=f"face à {rows[0].title}"),
        say(en="predicted ratio", fr="rapport prédit"),
        say(en="measured ratio", fr="rapport mesuré"),
        "p",
        say(en="verdict", fr="verdict"),
    )
    return Sheet(head, tuple(lines))


def predicted_and_run(row: LocalChoice, rounds: Sequence[float], record: RunRecord | None) -> Sheet:
    """A layout's step and peak: as predicted, as measured in turns with its neighbours, and in a run of its own."""
    own = record.footprint() if record else None
    peaks = [one.memory.peak_bytes for one in record.footprints if one.memory.peak_bytes] if record else []
    step_s = own.phases.step_s if own else None
    rows = (
        (
            say(en="step", fr="pas"),
            seconds(row.step_s),
            seconds(statistics.median(rounds)),
            "—" if step_s is None else seconds(step_s),
        ),
        (
            say(en="peak of the fullest rank", fr="pic du rang le plus rempli"),
            format_bytes(row.peak_bytes),
            "—",
            format_bytes(max(peaks)) if peaks else "—",
        ),
    )
    head = (
        row.title,
        say(en="predicted", fr="prédit"),
        say(en="measured, in turns", fr="mesuré, à tour de rôle"),
        say(en="measured, in a run", fr="mesuré, en exécution"),
    )
    return Sheet(head, rows)


def evidence(name: str) -> list[Row]:
    """The rows of a published table with their predictions."""
    return [
        Row(
            one.row.global_batch
            * flops_per_sequence(one.row.size, "recompute" if one.row.checkpointing == "full" else "model")
            / one.row.gpus,
            one.measured_s,
            one.predicted_s,
            not one.held_out,
        )
        for one in validate(name).rows
    ]


@or_to_do
def held_out(errors: Answer, names: Sequence[str]) -> Sheet:
    """Errors of the model and of a constant rate by the student's function, and of models that a fit has not seen."""
    rows = []
    for name in names:
        result = validate(name)
        model, constant = errors(evidence(name))
        unseen = "—" if result.left_out_mean is None else percent(result.left_out_mean)
        adds = say(en="yes", fr="oui") if model < constant else say(en="no", fr="non")
        both = (
            f"{percent(one)} | {percent(other)}" for one, other in ((model, result.mean), (constant, result.trivial))
        )
        rows.append((name, f"{len(result.held)} / {len(result.rows)}", *both, unseen, adds))
    head = (
        say(en="yours | the package", fr="vous | le paquet"),
        say(en="held out / rows", fr="mises de côté / lignes"),
        say(en="model", fr="modèle"),
        say(en="constant rate", fr="débit constant"),
        say(en="unseen models", fr="modèles jamais vus"),
        say(en="does it add anything?", fr="apporte-t-il quelque chose ?"),
    )
    return Sheet(head, tuple(rows))


def documents(files: Mapping[str, str], most: int = 24) -> None:
    """Print the files of a chosen layout, each cut to so many lines."""
    for name, text in files.items():
        lines = text.rstrip().splitlines()
        print(f"─── {name}")
        print("\n".join(lines[:most]) + ("\n…" if len(lines) > most else ""))
