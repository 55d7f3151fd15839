"""`dlojz demo`: the main job, CoAtNet on real images under every engine, predicted and measured.

Layer 6. Invariant: every run sees the same samples in the same order, so that one table may hold them all; a run that
was made before is found again.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dlojz import cli
from dlojz.cli.answer import answering, console, tell
from dlojz.cli.flags import Flag, json_flag, number, parse, root_flag
from dlojz.config import RunConfig
from dlojz.record import STATUSES
from dlojz.runs import Run
from dlojz.runs.store import runs_root
from dlojz.text import say
from dlojz.units import format_seconds
from dlojz.viz.grid import status_label

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
    return cli.DONE if all(run.state == "completed" for run in runs) else cli.FAILED


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
    from dlojz.launch import run as launch

    run = launch(config, on="local", again=again, wait=False, root=root)
    reused = run.state in STATUSES
    try:
        while run.state not in STATUSES:
            losses = run.losses
            figures = f"loss {losses[-1]:.4f}" if losses else say(en="starting", fr="démarrage")
            progress.update(task, completed=len(losses), figures=figures)
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        run.cancel()
        run.wait(SETTLE_S)
        raise
    progress.update(task, completed=len(run.losses))
    return run, reused
