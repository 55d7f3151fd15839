"""What went wrong with a run, and what to do about it: a diagnosis from its logs, its events and its end. Pure.

Layer 5. Invariant: a finding names a cause with its evidence (rank, collective, module, step), never a consequence;
what no rule knows is told with the first error of each rank and no guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dlojz.runs import diagnosis_rules as rules
from dlojz.runs.collective_rules import hung_collective
from dlojz.runs.diagnosis_rules import Finding, Symptoms
from dlojz.runs.first_errors import RankError, first_error, read_log
from dlojz.runs.memory_words import memory_lines
from dlojz.runs.recorded_calls import calls_of
from dlojz.runs.state import LOGS, read_all_events
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.viz.grid import status_label
from dlojz.viz.markup import safe, visible
from dlojz.viz.palette import BLUE, VERMILION
from dlojz.viz.run_panel import NO_FORMULAS

if TYPE_CHECKING:
    from dlojz.runs.handle import Run
    from dlojz.runs.post_mortem import PostMortem

RULES = (
    rules.out_of_memory,
    rules.time_limit,
    rules.diverged,
    rules.missing_module,
    rules.lost_node,
    rules.killed,
    rules.port_taken,
    hung_collective,
)
"""From what is certain to what is read out of several logs."""


@dataclass(frozen=True)
class Diagnosis:
    """What is known of how a run went; shows itself in a notebook and in a terminal.

    Args:
        run_id, title, state, reason: of the run.
        findings: the cause; empty if nothing is wrong, or nothing is known.
        errors: the first error of each rank that printed one, then of the launcher and of the job.
        memory: for a run out of memory, what filled it and the cheapest levers; None otherwise.
    """

    run_id: str
    title: str
    state: str
    reason: str
    findings: tuple[Finding, ...]
    errors: tuple[RankError, ...]
    memory: PostMortem | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "run_id": self.run_id,
            "state": self.state,
            "reason": self.reason,
            "findings": [finding._asdict() | {"ranks": list(finding.ranks)} for finding in self.findings],
            "errors": [vars(error) for error in self.errors],
            "memory": self.memory.to_dict() if self.memory else None,
        }

    def __repr__(self) -> str:
        lines = [f"{self.run_id} · {visible(self.title)} · {status_label(self.state)}"]
        if self.reason:
            lines.append(visible(self.reason))
        for finding in self.findings:
            lines += ["", f"✗ {visible(finding.what)}", *([f"  → {visible(finding.advice)}"] if finding.advice else [])]
        if not self.findings:
            lines += ["", self._nothing()]
        if self.memory:
            lines += ["", *memory_lines(self.memory)]
        if self.errors:
            lines += ["", self._heading(), *(f"  {where(error)}: {visible(error.text)}" for error in self.errors)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        color = VERMILION if self.findings else BLUE
        parts = [
            f'<div class="{NO_FORMULAS}" style="border-left:4px solid {color};padding:0.3em 0.9em;max-width:62em"><div>'
            f"<b>{safe(status_label(self.state))}</b> · {safe(self.title)} · <code>{safe(self.run_id)}</code></div>"
        ]
        parts += [f"<p>{safe(self.reason)}</p>"] if self.reason else []
        for finding in self.findings:
            advice = f"<br>→ {safe(finding.advice)}" if finding.advice else ""
            parts.append(f'<p><b style="color:{VERMILION}">✗ {safe(finding.what)}</b>{advice}</p>')
        parts += [] if self.findings else [f"<p>{safe(self._nothing())}</p>"]
        if self.memory:
            told = "<br>".join(safe(line) for line in memory_lines(self.memory))
            parts.append(f'<div style="font-family:monospace;white-space:pre-wrap">{told}</div>')
        if self.errors:
            rows = "".join(
                f'<tr><th scope="row" style="text-align:left;font-weight:normal;white-space:nowrap;vertical-align:top">'
                f'{safe(where(error))}</th><td style="text-align:left"><code>{safe(error.text)}</code></td></tr>'
                for error in self.errors
            )
            parts.append(
                f'<table><caption style="text-align:left">{safe(self._heading())}</caption>'
                f"<tbody>{rows}</tbody></table>"
            )
        return "".join(parts) + "</div>"

    def _nothing(self) -> str:
        if self.state in ("running", "queued") and self.errors:
            return say(
                en="It has not ended yet, but its logs tell of errors: look again in a moment.",
                fr="Elle n’est pas finie, mais ses journaux signalent des erreurs : revenez dans un instant.",
            )
        if self.state in ("completed", "running", "queued"):
            return say(en="Nothing is wrong with it.", fr="Rien d’anormal.")
        return say(
            en="No known cause was recognised: read the first errors below and `dlojz logs`.",
            fr="Aucune cause connue n’a été reconnue : lisez les premières erreurs ci-dessous et `dlojz logs`.",
        )

    @staticmethod
    def _heading() -> str:
        return say(en="The first error of each log:", fr="La première erreur de chaque journal :")


def where(error: RankError) -> str:
    """In which log, and at which line of it."""
    if error.rank is None:
        return say(en=f"job or launcher, line {error.line}", fr=f"travail ou lanceur, ligne {error.line}")
    return say(en=f"rank {error.rank}, line {error.line}", fr=f"rang {error.rank}, ligne {error.line}")


def find_causes(symptoms: Symptoms) -> tuple[Finding, ...]:
    """The cause that the first rule recognises: what the later ones see may follow from it."""
    found = (rule(symptoms) for rule in RULES)
    return tuple(finding for finding in found if finding is not None)[:1]


def symptoms_of(run: Run) -> Symptoms:
    """All that the folder of a run tells of how it went.

    Raises:
        LabError: if the folder cannot be read.
    """
    config, record = run.config, run.record
    texts: Mapping[int | None, str] = {
        rank: read_log(run.folder / LOGS / f"rank-{rank}.log") for rank in range(config.layout.world_size)
    }
    job = "\n".join(read_log(run.folder / LOGS / f"{name}.log") for name in ("launcher", "slurm"))
    told = read_all_events(run.folder)
    return Symptoms(
        status=run.state,
        reason=record.reason if record else "",
        world_size=config.layout.world_size,
        learning_rate=config.learning_rate,
        steps=len(run.losses),
        losses=run.losses,
        logs={**texts, None: job},
        started=frozenset(told),
        calls={rank: calls for rank, events in told.items() if (calls := calls_of(events))},
    )


def diagnose(run: Run) -> Diagnosis:
    """What went wrong with a run, and what to do about it.

    Raises:
        LabError: if the folder of the run cannot be read.
    """
    symptoms = symptoms_of(run)
    errors = tuple(error for rank, text in symptoms.logs.items() if (error := first_error(text, rank)) is not None)
    return Diagnosis(
        run_id=run.run_id,
        title=run.config.title,
        state=symptoms.status,
        reason=symptoms.reason,
        findings=find_causes(symptoms) if symptoms.status not in ("completed", "running", "queued") else (),
        errors=errors if symptoms.status != "completed" else (),
        memory=_memory(run) if symptoms.status == "oom" else None,
    )


def _memory(run: Run) -> PostMortem | None:
    from dlojz.runs.post_mortem import post_mortem

    try:
        return post_mortem(run)
    except LabError:  # no rule predicts this layout, and nothing was measured
        return None
