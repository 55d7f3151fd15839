"""Commands on runs: `dlojz run`, `predict`, `demo`, `compare`, `runs`, `logs`, `cancel`.

`dlojz run` and `dlojz predict`.

The configuration is whole and legal before anything is started.

`dlojz demo`: the main job, CoAtNet on real images under every engine, predicted and measured.

Every run sees the same samples in the same order, so that one table may hold them all; a run that was made before is
found again.

`dlojz runs`, `logs` and `cancel`: what has been run.

One damaged run never hides the others; it is named on stderr.

`dlojz compare`: measurements over predictions, run by run.

What is left out of a comparison is said.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dlojz.base.errors import LabError
from dlojz.base.language import decimal, format_seconds, say
from dlojz.base.table import Table
from dlojz.cli import main
from dlojz.cli.options import (
    Flag,
    answering,
    config_flags,
    config_of,
    console,
    json_flag,
    number,
    parse,
    predicting_flags,
    root_flag,
    scheduler_flags,
    show,
    target_device,
    tell,
)
from dlojz.config.run_config import RunConfig
from dlojz.config.schedules import COMPRESSED, does_nothing
from dlojz.display.tables import DASH, status_label
from dlojz.results.record import STATUSES
from dlojz.running.run import Run, find, survey
from dlojz.running.store import runs_root

RUN_HELP = {
    "en": """Train a model on several processes, really, and measure memory, communication and time.

The same request finds the same run again; --again makes another. Prints the measurement beside the prediction.
Exit code: 0 completed or diverged, 1 ended otherwise, 2 refused.

Examples:
  dlojz run --model coatnet_tiny --dp 2 --steps 20
  dlojz run --model coatnet_tiny --dp 2 --zero 2 --engine deepspeed --micro-batch 16 --json
  dlojz run --model coatnet_7 --dp 8 --zero 3 --device cuda --on slurm --machine local""",
    "fr": """Entraîner un modèle sur plusieurs processus, réellement, et mesurer mémoire, communication et temps.

La même demande retrouve la même exécution ; --again en fait une autre. Affiche la mesure à côté de la prédiction.
Code de sortie : 0 terminé ou divergé, 1 fini autrement, 2 refusé.

Exemples :
  dlojz run --model coatnet_tiny --dp 2 --steps 20
  dlojz run --model coatnet_tiny --dp 2 --zero 2 --engine deepspeed --micro-batch 16 --json
  dlojz run --model coatnet_7 --dp 8 --zero 3 --device cuda --on slurm --machine local""",
}
PREDICT_HELP = {
    "en": """Say what one training step will cost one rank: memory by category, communication, FLOPs. Nothing is run.

Each category with the largest it takes within a step, then the peak of their sum. `dlojz memory` tells more of it:
what fills it, whether it fits, what would save memory.

Examples:
  dlojz predict --model coatnet_tiny --dp 2 --zero 2 --engine deepspeed
  dlojz predict --model coatnet_7 --dp 8 --zero 3 --device a100-80 --json""",
    "fr": """Dire ce qu'un pas d'entraînement coûtera à un rang : mémoire, communication, FLOPs. Rien n'est exécuté.

Chaque catégorie avec son maximum dans le pas, puis le pic de leur somme. `dlojz memory` en dit plus : ce qui remplit
la mémoire, si elle suffit, ce qui en économiserait.

Exemples :
  dlojz predict --model coatnet_tiny --dp 2 --zero 2 --engine deepspeed
  dlojz predict --model coatnet_7 --dp 8 --zero 3 --device a100-80 --json""",
}


def run_command(words: list[str]) -> int:
    """Train, then show the measurement over the prediction."""
    flags = [
        *config_flags(),
        _processes_flag(),
        Flag(
            "on",
            say(
                en="where: local, slurm or replay (default: slurm for --device cuda where there is one, else local)",
                fr="où : local, slurm ou replay (par défaut : slurm pour --device cuda s’il y en a un, sinon local)",
            ),
            metavar="PLACE",
        ),
        Flag(
            "machine",
            say(
                en="machine file of the cluster, see `dlojz machines` (default: this cluster's)",
                fr="fichier de machine du calculateur, voir `dlojz machines` (par défaut : celui d’ici)",
            ),
            metavar="NAME",
        ),
        *scheduler_flags(),
        Flag(
            "checkpoint_every",
            say(
                en="steps between two checkpoints (default: one before the time limit only)",
                fr="nombre de pas entre deux points de reprise (par défaut : un seul, avant la limite de temps)",
            ),
            metavar="INT",
        ),
        Flag(
            "time_limit_s",
            say(en="seconds after which the run is stopped", fr="secondes après lesquelles l'exécution est arrêtée"),
            metavar="FLOAT",
        ),
        Flag(
            "again",
            say(
                en="run again although a run of this request exists",
                fr="exécuter à nouveau même si cette demande a déjà été exécutée",
            ),
            kind="switch",
        ),
        root_flag(),
        json_flag(),
    ]
    given = parse("run", say(**RUN_HELP), flags, words)
    config = _config(given)
    from dlojz.compare import compare
    from dlojz.running.launch import run as launch

    if config.optimizer in COMPRESSED and config.layout.dp == 1:
        tell(does_nothing(config.optimizer))
    with answering(given.get("json", False)) as answer:
        run = launch(
            config,
            on=given.get("on"),
            machine=given.get("machine"),
            **{name: given.get(name, "") for name in ("account", "qos", "reservation")},
            checkpoint_every=number(given, "checkpoint_every", least=1),
            again=given.get("again", False),
            wait=False,
            time_limit_s=number(given, "time_limit_s", float),
            root=given.get("root"),
        )
        if run.record is not None:
            tell(
                say(
                    en=f"{run.run_id}: this request was run before; its record is shown (--again runs it again).",
                    fr=f"{run.run_id} : cette demande a déjà été exécutée ; voici ses mesures (--again recommence).",
                )
            )
        record = run.follow().record
        if record is None:
            tell(
                say(
                    en=f"{run.run_id} ended without a record: see `dlojz logs {run.run_id}`.",
                    fr=f"{run.run_id} s'est terminée sans mesures : voir `dlojz logs {run.run_id}`.",
                )
            )
            return main.FAILED
        if given.get("json"):
            answer(record.to_dict())
        else:
            answer(compare(record))
            answer(say(en=f"kept in {run.folder}", fr=f"gardé dans {run.folder}"))
        if record.status in ("completed", "diverged"):
            return main.DONE
        tell(f"dlojz: {run.run_id}: {record.status}: {record.reason}")
        return main.FAILED


def predict_command(words: list[str]) -> int:
    """Show the predicted footprint."""
    flags = [
        *predicting_flags(),
        _processes_flag(),
        Flag(
            "rank",
            say(en="rank whose footprint is told", fr="rang dont on donne l'empreinte"),
            metavar="INT",
            default="0",
        ),
        json_flag(),
    ]
    given = parse("predict", say(**PREDICT_HELP), flags, words)
    target = target_device(given)
    config = _config(given)
    from dlojz.display.tables import footprint_table
    from dlojz.prediction import predict

    with answering(given.get("json", False)) as answer:
        footprint = predict(config, rank=number(given, "rank") or 0, device=target)
        answer(footprint.to_dict() if given.get("json") else footprint_table(config, footprint))
    return main.DONE


def _processes_flag() -> Flag:
    return Flag(
        "processes",
        say(
            en="processes you mean to use; refused unless dp × tp × pp gives as many",
            fr="processus prévus ; refusé si dp × tp × pp en donne un autre nombre",
        ),
        metavar="INT",
    )


def _config(given: dict[str, Any]) -> RunConfig:
    """The configuration asked for, checked against the number of processes where one is given."""
    config = config_of(given)
    processes = number(given, "processes", least=1)
    if processes is not None:
        config.layout.check_processes(processes)
    return config


STEPS, MICRO_BATCH, PROCESSES = 30, 16, 2
POLL_S, SETTLE_S = 0.2, 30.0


def demo_configs(steps: int = STEPS, processes: int = PROCESSES) -> list[RunConfig]:
    """The runs of the demo: one process accumulating what the others share out, then every engine.

    Args:
        steps: optimizer steps of each run.
        processes: data-parallel processes of the parallel runs.
    """
    parallel: dict[str, Any] = {"dp": processes, "micro_batch": MICRO_BATCH}
    layouts: list[dict[str, Any]] = [
        {"engine": "single", "micro_batch": MICRO_BATCH, "micro_batches": processes},
        {"engine": "torch", **parallel},
        {"engine": "torch", "zero": 3, **parallel},
        *({"engine": "deepspeed", "zero": stage, **parallel} for stage in range(4)),
    ]
    return [RunConfig.of(model="coatnet_tiny", data="digits", steps=steps, **layout) for layout in layouts]


def demo_command(words: list[str]) -> int:
    """Run, compare, explain."""
    given = parse(
        "demo",
        say(
            en="""The main job: CoAtNet on real images (handwritten digits) on one process, then on 2 processes
under DDP, FSDP2 and DeepSpeed ZeRO-0, 1, 2, 3. Prints one table, predicted beside measured, saves one figure
and says what they show. Takes 2 to 4 minutes on 2 cores; runs made before are found again.

Examples:
  dlojz demo
  dlojz demo --steps 10 --again""",
            fr="""Le travail principal : CoAtNet sur de vraies images (chiffres manuscrits), sur un processus, puis
sur 2 processus sous DDP, FSDP2 et DeepSpeed ZeRO-0, 1, 2, 3. Affiche un tableau, prédit à côté de mesuré, enregistre
une figure et dit ce qu'ils montrent. Prend 2 à 4 minutes sur 2 cœurs ; les exécutions déjà faites sont retrouvées.

Exemples :
  dlojz demo
  dlojz demo --steps 10 --again""",
        ),
        [
            Flag(
                "steps",
                say(en="optimizer steps of each run", fr="pas de chaque exécution"),
                metavar="INT",
                default=str(STEPS),
            ),
            Flag(
                "again", say(en="run again what was run before", fr="refaire ce qui a déjà été exécuté"), kind="switch"
            ),
            root_flag(),
            json_flag(),
        ],
        words,
    )
    configs = demo_configs(number(given, "steps", least=1) or STEPS)
    from dlojz.compare import compare

    with answering(given.get("json", False)) as answer:
        started_s = time.monotonic()
        runs = _run_all(configs, again=given.get("again", False), root=given.get("root"))
        comparison = compare(runs)
        figure = runs_root(given.get("root")) / "demo.png"
        comparison.figure(figure)
        if given.get("json"):
            answer(comparison.to_dict())
        else:
            answer(comparison)
            answer("\n" + "\n".join(comparison.findings()))
            answer(say(en=f"figure: {figure}", fr=f"figure : {figure}"))
        tell(
            say(
                en=f"{len(runs)} runs in {format_seconds(time.monotonic() - started_s)}.",
                fr=f"{len(runs)} exécutions en {format_seconds(time.monotonic() - started_s)}.",
            )
        )
    return main.DONE if all(run.state == "completed" for run in runs) else main.FAILED


def _run_all(configs: list[RunConfig], again: bool, root: str | Path | None) -> list[Run]:
    """One run after the other, so that none slows another, under one bar on stderr."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    shown = console()
    with Progress(*columns, console=shown, disable=not shown.is_terminal) as progress:
        overall = progress.add_task(say(en="runs", fr="exécutions"), total=len(configs), figures="")
        current = progress.add_task("", total=1, figures="")
        runs = []
        for number_, config in enumerate(configs, 1):
            progress.reset(current, total=config.steps, description=f"  {config.layout.title}", figures="")
            started_s = time.monotonic()
            run, reused = _run_one(config, again, root, progress, current)
            progress.advance(overall)
            how = say(en="found again", fr="retrouvée") if reused else format_seconds(time.monotonic() - started_s)
            reason = run.record.reason if run.record else ""
            shown.print(
                f"{number_}/{len(configs)} {config.title}: {status_label(run.state)}, "
                f"{len(run.losses)}/{config.steps} ({how}) {reason}".rstrip(),
                markup=False,
            )
            runs.append(run)
    return runs


def _run_one(
    config: RunConfig, again: bool, root: str | Path | None, progress: Progress, task: Any
) -> tuple[Run, bool]:
    """Start one run, or find it again, and follow it to its end."""
    from dlojz.running.launch import run as launch

    run = launch(config, on="local", again=again, wait=False, root=root)
    reused = run.state in STATUSES
    try:
        while run.state not in STATUSES:
            losses = run.losses
            figures = f"loss {decimal(losses[-1], 4)}" if losses else say(en="starting", fr="démarrage")
            progress.update(task, completed=len(losses), figures=figures)
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        run.cancel()
        run.wait(SETTLE_S)
        raise
    progress.update(task, completed=len(run.losses))
    return run, reused


def runs_command(words: list[str]) -> int:
    """List the runs."""
    given = parse(
        "runs",
        say(
            en="""List the runs, newest first: id, title, state, steps, last loss, age.

Examples:
  dlojz runs
  dlojz runs --json""",
            fr="""Lister les exécutions, la plus récente d'abord : nom, titre, état, pas, dernière perte, âge.

Exemples :
  dlojz runs
  dlojz runs --json""",
        ),
        [root_flag(), json_flag()],
        words,
    )
    with answering(given.get("json", False)) as answer:
        found = [_summary(run) for run in readable(given)]
        if given.get("json"):
            answer(found)
        elif not found:
            answer(
                say(
                    en="there is no run yet: start one with `dlojz run --dp 2`.",
                    fr="il n'y a pas encore d'exécution : commencez par `dlojz run --dp 2`.",
                )
            )
        else:
            answer(_table(found))
    return main.DONE


def logs_command(words: list[str]) -> int:
    """Print the logs of a run."""
    given = parse(
        "logs",
        say(
            en="""Show the end of what the launcher and every rank of a run printed; of a run that went wrong,
first the cause, the first error of each rank, and what to do.

The beginning of a name is enough, where only one run begins so.

Examples:
  dlojz logs 20250101-120000
  dlojz logs 20250101-120000 --rank 1""",
            fr="""Montrer la fin de ce que le lanceur et chaque rang d'une exécution ont affiché ;
si elle a échoué, d’abord la cause, la première erreur de chaque rang, et que faire.

Le début du nom suffit, si une seule exécution commence ainsi.

Exemples :
  dlojz logs 20250101-120000
  dlojz logs 20250101-120000 --rank 1""",
        ),
        [run_words(), Flag("rank", say(en="one rank only", fr="un seul rang"), metavar="INT"), root_flag()],
        words,
    )
    run = _the_run("logs", given)
    rank = number(given, "rank")
    printed = run.logs(rank)
    if rank is None and run.state not in ("completed", "running", "queued"):
        show(repr(run.diagnosis()))
        show("")
    show(printed)
    return main.DONE


def cancel_command(words: list[str]) -> int:
    """Ask a run to stop."""
    given = parse(
        "cancel",
        say(
            en="""Ask a run to stop; what it measured is kept. A job leaves the queue; a run that has ended stays.

Examples:
  dlojz cancel 20250101-120000
  dlojz cancel 20250101-120000-0123456789ab-cdef""",
            fr="""Demander l'arrêt d'une exécution ; ses mesures sont gardées. Un travail quitte la file d’attente.

Exemples :
  dlojz cancel 20250101-120000
  dlojz cancel 20250101-120000-0123456789ab-cdef""",
        ),
        [run_words(), root_flag()],
        words,
    )
    show(_the_run("cancel", given).cancel())
    return main.DONE


def run_words(metavar: str = "RUN") -> Flag:
    """The flag that takes names of runs."""
    return Flag(
        "words",
        say(
            en="name of a run, or its beginning (see `dlojz runs`)",
            fr="nom d'une exécution, ou son début (voir `dlojz runs`)",
        ),
        metavar=metavar,
        kind="words",
    )


def _the_run(command: str, given: dict[str, Any]) -> Run:
    names = given.get("words", ())
    if len(names) != 1:
        raise LabError(
            f"`dlojz {command}` takes the name of one run, but {len(names)} were received: `dlojz runs` lists them."
        )
    return find(names[0], given.get("root"))


def readable(given: dict[str, Any]) -> list[Run]:
    """The runs that can be read, newest first; the others are named on stderr."""
    found = survey(given.get("root"))
    for run_id, reason in found.bad.items():
        tell(say(en=f"{run_id} is left out: {reason}", fr=f"{run_id} est laissée de côté : {reason}"))
    return found.good


def _summary(run: Run) -> dict[str, Any]:
    losses = run.losses
    return {
        "run_id": run.run_id,
        "title": run.title,
        "state": run.state,
        "steps": len(losses),
        "asked_steps": run.config.steps,
        "last_loss": losses[-1] if losses else None,
        "age_s": _age_s(run.run_id),
    }


def _age_s(run_id: str) -> float | None:
    """Seconds since the time that the name of a run begins with."""
    try:
        born = datetime.strptime(run_id[:15], "%Y%m%d-%H%M%S").replace(tzinfo=UTC)
    except ValueError:
        return None
    return max(0.0, round((datetime.now(UTC) - born).total_seconds(), 1))


def _table(found: Iterable[dict[str, Any]]) -> Table:
    titles = (
        say(en="run", fr="exécution"),
        say(en="title", fr="titre"),
        say(en="state", fr="état"),
        say(en="steps", fr="pas"),
        say(en="last loss", fr="perte"),
        say(en="age", fr="âge"),
    )
    rows = []
    for run in found:
        loss = DASH if run["last_loss"] is None else decimal(run["last_loss"], 4)
        done = f"{run['steps']}/{run['asked_steps']}"
        rows.append((run["run_id"], run["title"], status_label(run["state"]), done, loss, _age(run["age_s"])))
    return Table(titles, tuple(rows), align="l", whole=1)  # a name is copied whole


def _age(age_s: float | None) -> str:
    if age_s is None or age_s < 7200:
        return format_seconds(age_s)
    return (
        f"{age_s / 3600:.0f} h"
        if age_s < 172_800
        else say(en=f"{age_s / 86_400:.0f} days", fr=f"{age_s / 86_400:.0f} jours")
    )


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
    return main.DONE


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
