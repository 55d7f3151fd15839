"""`dlojz compare`: measurements over predictions, run by run.

Layer 6. Invariant: what is left out of a comparison is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dlojz import cli
from dlojz.cli.answer import answering, tell
from dlojz.cli.flags import Flag, json_flag, parse, root_flag
from dlojz.cli.records import readable, run_words
from dlojz.runs import Run, find
from dlojz.schema import LabError
from dlojz.text import say

MOST_COMPARED = 12


def compare_command(words: list[str]) -> int:
    """Lay measurements over predictions."""
    given = parse(
        "compare",
        say(
            en="""Lay the measurements of runs over their predictions: losses, throughput, memory, communication.

Without names: the newest run of each layout, of the same training as the newest run of all. A run on one process
among them (--engine single) gives the losses and the throughput that the parallel ones are judged by.

Examples:
  dlojz compare
  dlojz compare 20250101-1200 20250101-1201 --figure compare.png""",
            fr="""Superposer les mesures aux prédictions : pertes, débit, mémoire, communication.

Sans nom : l'exécution la plus récente de chaque découpage, pour l'entraînement le plus récent. Une exécution sur un
seul processus parmi elles (--engine single) donne les pertes et le débit auxquels comparer les autres.

Exemples :
  dlojz compare
  dlojz compare 20250101-1200 20250101-1201 --figure comparaison.png""",
        ),
        [
            run_words("[RUN…]"),
            Flag(
                "figure",
                say(en="picture to write (.png, .svg, .pdf)", fr="image à écrire (.png, .svg, .pdf)"),
                metavar="FILE",
            ),
            Flag(
                "overlay",
                say(
                    en="picture of a pipeline's measured step under its simulation (of the last run named)",
                    fr="image du pas mesuré d'un pipeline sous sa simulation (de la dernière exécution nommée)",
                ),
                metavar="FILE",
            ),
            root_flag(),
            json_flag(),
        ],
        words,
    )
    from dlojz.compare import compare

    with answering(given.get("json", False)) as answer:
        names = given.get("words", ())
        chosen = [find(name, given.get("root")) for name in names] if names else _together(readable(given))
        comparison = compare(chosen)
        if "figure" in given:  # before the table: a path that cannot be written is refused at once
            comparison.figure(given["figure"])
        if "overlay" in given:
            _draw_overlay(chosen, given["overlay"])
        answer(comparison.to_dict() if given.get("json") else comparison)
        if not given.get("json"):
            answer("\n".join(comparison.findings()))
        if "figure" in given:
            tell(say(en=f"figure: {given['figure']}", fr=f"figure : {given['figure']}"))
    return cli.DONE


def _draw_overlay(chosen: Sequence[Run], path: str) -> None:
    """The last of the runs that is a pipeline, measured and simulated."""
    pipelines = [run for run in chosen if run.config.layout.pp > 1]
    if not pipelines:
        raise LabError(
            say(
                en="--overlay draws a pipeline run, but none of these runs has pp=2 or more: name one, or start it "
                "with dlojz run --pp 2.",
                fr="--overlay dessine un pipeline, mais aucune de ces exécutions n’a pp=2 ou plus : nommez-en une, ou "
                "lancez-la avec dlojz run --pp 2.",
            )
        )
    pipelines[-1].overlay(path)
    tell(say(en=f"overlay: {path}", fr=f"superposition : {path}"))


def _together(newest_first: Sequence[Run]) -> list[Run]:
    """The newest run of each layout, of the same training as the newest run that measured something; oldest first."""
    reference = next((run for run in newest_first if _has_measured(run)), None) or next(iter(newest_first), None)
    chosen: dict[str, Run] = {}
    for run in newest_first:
        if reference is not None and _training(run) == _training(reference):
            kept_so_far = chosen.setdefault(run.config.hash, run)
            if not _has_measured(kept_so_far) and _has_measured(run):
                chosen[run.config.hash] = run
    kept = list(chosen.values())[:MOST_COMPARED]
    if len(kept) < len(newest_first):
        tell(
            say(
                en=f"{len(kept)} of {len(newest_first)} runs are compared: the newest of each layout, same training, "
                f"at most {MOST_COMPARED}; name others to compare them.",
                fr=f"Exécutions comparées : {len(kept)} sur {len(newest_first)}, la plus récente de chaque "
                f"découpage, même entraînement, au plus {MOST_COMPARED} ; nommez-en d'autres pour les comparer.",
            )
        )
    return kept[::-1]


def _has_measured(run: Run) -> bool:
    return bool(run.record and run.record.footprints)


def _training(run: Run) -> tuple[Any, ...]:
    config = run.config
    return (
        config.model,
        config.data_name,
        config.image_size,
        config.sequence_length,
        config.precision,
        config.optimizer,
        config.learning_rate,
        config.weight_decay,
        config.seed,
        config.steps,
        config.layout.global_batch,
    )
