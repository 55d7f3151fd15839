"""The flags of the course's command line, and the run they ask for.

Layer 6. Invariant: argparse only splits the words and writes the help; whether a value is legal is said by the
contracts, so that a notebook, `dlojz run` and this command refuse with the same sentence.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from dlojz.cli.flags import number
from dlojz.config import Layout, RunConfig
from dlojz.schema import LabError, one_of
from dlojz.text import say
from dlojz.train.deepspeed_json import left_to_the_lab, read_deepspeed_json

HELP = {
    "en": """Train as the course does, in every process that a launcher has started:

  srun python -m dlojz.train -b 28 -s 200 --image-size 288 --deepspeed --deepspeed_config ds_config_zero2.json
  torchrun --nproc-per-node 2 -m dlojz.train -b 8 -s 10 --image-size 64
  python -m dlojz.train -b 8 -s 10 --image-size 64
  torchrun --nproc-per-node 4 -m dlojz.train --model alexnet_tiny -p 2 --steps 200 --deepspeed_config ds_config.json

Without --deepspeed the ranks train with DDP; with it, with the ZeRO stage of the JSON file. The number of ranks is the
launcher's. Losses, throughput and memory are printed at the end and kept in a run folder, as `dlojz run` does:
`dlojz runs` lists it, `dlojz compare` lays it over the prediction.
Exit code: 0 completed or diverged, 1 ended otherwise, 2 refused.""",
    "fr": """Entraîner comme dans le cours, dans chaque processus qu’un lanceur a démarré :

  srun python -m dlojz.train -b 28 -s 200 --image-size 288 --deepspeed --deepspeed_config ds_config_zero2.json
  torchrun --nproc-per-node 2 -m dlojz.train -b 8 -s 10 --image-size 64
  python -m dlojz.train -b 8 -s 10 --image-size 64
  torchrun --nproc-per-node 4 -m dlojz.train --model alexnet_tiny -p 2 --steps 200 --deepspeed_config ds_config.json

Sans --deepspeed, les rangs s’entraînent avec DDP ; avec, selon le stage ZeRO du fichier JSON. Le nombre de rangs est
celui du lanceur. Pertes, débit et mémoire sont affichés à la fin et gardés dans un dossier d’exécution, comme avec
`dlojz run` : `dlojz runs` le liste, `dlojz compare` le superpose à la prédiction.
Code de sortie : 0 terminé ou divergé, 1 fini autrement, 2 refusé.""",
}
_FIELDS = ("model", "data", "data_root", "precision", "optimizer", "seed", "device")
_LAYOUT_FIELDS = ("zero", "engine", "checkpointing", "offload", "schedule", "chunks", "partition")
_DEEPSPEEDS_OWN = ("zero", "engine", "offload")


class _Parser(argparse.ArgumentParser):
    """Refuses with a `LabError`, and names the nearest flag."""

    def error(self, message: str) -> NoReturn:
        raise LabError(
            say(
                en=f"{message[0].lower()}{message[1:]}: see python -m dlojz.train --help.",
                fr=f"ligne de commande illisible ({message}) : voir python -m dlojz.train --help.",
            )
        )


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Split the words of the command line.

    Raises:
        LabError: for an unknown flag, a flag without its value, or a value that is no number where one is needed.
        SystemExit: 0, once `--help` has been printed.
    """
    parser = _parser()
    given, unknown = parser.parse_known_args(list(words))
    if unknown:
        flags = [name for action in parser._actions for name in action.option_strings]
        first = unknown[0].split("=")[0]
        if first.startswith("-"):
            raise LabError(one_of(say(en="flag", fr="option"), first, flags))
        raise LabError(
            say(
                en=f"the word {first!r} belongs to no flag: an option is written --name VALUE.",
                fr=f"le mot {first!r} n’appartient à aucune option : une option s’écrit --nom VALEUR.",
            )
        )
    return given


def configure(given: argparse.Namespace, processes: int) -> tuple[RunConfig, tuple[str, ...]]:
    """The run that the flags ask for, on so many processes.

    Returns:
        the run, and the keys of DeepSpeed's JSON file that the lab sets by itself.

    Raises:
        LabError: if flags, JSON file and processes do not fit together.
    """
    stages = number({"p": given.p}, "p", least=1)
    if processes % stages:
        raise LabError(
            say(
                en=f"-p {stages} pipeline stages do not divide {processes} processes: start a multiple of {stages}.",
                fr=f"-p {stages} étages de pipeline ne divisent pas {processes} processus : lancez-en un multiple de "
                f"{stages}.",
            )
        )
    asked: dict[str, Any] = {name: getattr(given, name) for name in (*_FIELDS, *_LAYOUT_FIELDS)}
    asked |= {
        "micro_batch": given.batch_size,
        "steps": given.steps,
        "image_size": given.image_size,
        "sequence_length": given.sequence_length,
        "learning_rate": given.learning_rate,
        "weight_decay": given.weight_decay,
        "micro_batches": given.accumulation,
    }
    asked = {name: value for name, value in asked.items() if value is not None}
    asked |= {"dp": processes // stages, "pp": stages}
    if given.deepspeed_config is None:
        if given.deepspeed:
            raise LabError(
                say(
                    en="--deepspeed needs --deepspeed_config FILE, DeepSpeed's JSON file, but none was received.",
                    fr="--deepspeed demande --deepspeed_config FICHIER, le JSON de DeepSpeed, mais aucun n’a été reçu.",
                )
            )
        return RunConfig.of(**asked), ()
    for name in _DEEPSPEEDS_OWN:
        if name in asked and asked[name] not in ("deepspeed", "activations"):
            raise LabError(
                say(
                    en=f"--{name} {asked[name]} was received beside --deepspeed_config, whose file says it: leave one "
                    "of them out.",
                    fr=f"--{name} {asked[name]} a été reçu avec --deepspeed_config, dont le fichier le dit déjà : "
                    "retirez l’un des deux.",
                )
            )
    base = RunConfig.of(**{**asked, "engine": "deepspeed"})
    config = read_deepspeed_json(given.deepspeed_config, base)
    _check_agreement(asked, base, config)
    return config, left_to_the_lab(given.deepspeed_config)


def _check_agreement(asked: Iterable[str], base: RunConfig, config: RunConfig) -> None:
    """What is said twice is said alike."""
    for name in asked:
        value, read = (getattr(one.layout if name in Layout.model_fields else one, name) for one in (base, config))
        if read != value:
            raise LabError(
                say(
                    en=f"{name} is {value} on the command line and {read} in DeepSpeed's JSON file: change one of "
                    "them, or leave one out.",
                    fr=f"{name} vaut {value} sur la ligne de commande et {read} dans le JSON de DeepSpeed : changez "
                    "l’un des deux, ou retirez-le.",
                )
            )


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m dlojz.train",
        description=say(**HELP),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    count: dict[str, Any] = {"metavar": "INT"}
    add = parser.add_argument
    add(
        "-b",
        "--batch-size",
        **count,
        help=say(en="samples per micro-batch and rank", fr="taille du micro-batch, par rang"),
    )
    add("-s", "--steps", **count, help=say(en="optimizer steps", fr="pas de l’optimiseur"))
    add("--image-size", **count, help=_described("image_size"))
    add("--sequence-length", **count, help=_described("sequence_length"))
    deepspeed = say(en="train with DeepSpeed", fr="entraîner avec DeepSpeed")
    add("--deepspeed", action="store_true", help=deepspeed)
    add(
        "--deepspeed_config",
        "--deepspeed-config",
        metavar="FILE",
        help=say(en="DeepSpeed's JSON file: stage, offloading, …", fr="le JSON de DeepSpeed : stage, offload…"),
    )
    add(
        "-p",
        "--pipeline-parallel-size",
        dest="p",
        default="1",
        **count,
        help=say(
            en="pipeline stages; the other ranks are replicas of them",
            fr="étages de pipeline ; les autres rangs en sont des répliques",
        ),
    )
    add("--accumulation", **count, help=_described("micro_batches"))
    add("--lr", "--learning-rate", dest="learning_rate", metavar="FLOAT", help=_described("learning_rate"))
    add("--wd", "--weight-decay", dest="weight_decay", metavar="FLOAT", help=_described("weight_decay"))
    for name in (*_FIELDS, *_LAYOUT_FIELDS):
        metavar = "INT" if name in ("seed", "zero", "chunks") else "TEXT"
        add("--" + name.replace("_", "-"), metavar=metavar, help=_described(name))
    add("--local_rank", "--local-rank", help=argparse.SUPPRESS)  # what DeepSpeed's launcher adds
    add(
        "--root",
        metavar="FOLDER",
        help=say(
            en="folder of the runs (default: $DLOJZ_RUNS, else runs/)",
            fr="dossier des exécutions (par défaut : $DLOJZ_RUNS, sinon runs/)",
        ),
    )
    return parser


def _described(name: str) -> str:
    fields = {**RunConfig.model_fields, **Layout.model_fields}
    return (fields[name].description or "").replace("%", "%%")
