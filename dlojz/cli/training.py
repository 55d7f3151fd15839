"""`dlojz run` and `dlojz predict`.

Layer 6. Invariant: the configuration is whole and legal before anything is started.
"""

from __future__ import annotations

from typing import Any

from dlojz import cli
from dlojz.cli.answer import answering, tell
from dlojz.cli.flags import (
    Flag,
    config_flags,
    config_of,
    json_flag,
    number,
    parse,
    predicting_flags,
    root_flag,
    scheduler_flags,
    target_device,
)
from dlojz.config import RunConfig
from dlojz.optimizer_stages import COMPRESSED, does_nothing
from dlojz.text import say

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
    from dlojz.launch import run as launch

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
            return cli.FAILED
        if given.get("json"):
            answer(record.to_dict())
        else:
            answer(compare(record))
            answer(say(en=f"kept in {run.folder}", fr=f"gardé dans {run.folder}"))
        if record.status in ("completed", "diverged"):
            return cli.DONE
        tell(f"dlojz: {run.run_id}: {record.status}: {record.reason}")
        return cli.FAILED


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
    from dlojz.predict import predict
    from dlojz.viz.tables import footprint_table

    with answering(given.get("json", False)) as answer:
        footprint = predict(config, rank=number(given, "rank") or 0, device=target)
        answer(footprint.to_dict() if given.get("json") else footprint_table(config, footprint))
    return cli.DONE


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
