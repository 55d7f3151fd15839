"""DeepSpeed's JSON file beside a program's command line: both say the size of a batch, and must say the same.

Layer 3, loads neither torch nor DeepSpeed. Invariant: what the command line says is trained. What the file leaves out
is taken from there, as `"auto"` is by Accelerate and by the Hugging Face Trainer; what it says otherwise is refused:
DeepSpeed alone would follow the file, while the samples are dealt out by the command line.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any, NoReturn

from dlojz.text import say


def completed(args: argparse.Namespace) -> dict[str, Any]:
    """What the file of a command line says, with the sizes that it leaves out.

    Args:
        args: with `deepspeed_config`, the path of the file.

    Raises:
        SystemExit: with one sentence, if there is no such file, or it says another training than the command line.
    """
    document = _document(args.deepspeed_config)
    sizes = {
        "train_micro_batch_size_per_gpu": ("-b", args.batch_size),
        "gradient_accumulation_steps": ("--accumulation", args.accumulation),
    }
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    both = {
        **sizes,
        "train_batch_size": (f"-b × --accumulation × {ranks}", args.batch_size * args.accumulation * ranks),
    }
    for key, (option, asked) in both.items():
        if document.get(key, "auto") not in ("auto", asked):
            _differ(args.deepspeed_config, key, document[key], option, asked)
    zero = document.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    if args.zero and args.zero != stage:
        _differ(args.deepspeed_config, "stage", stage, "--zero", args.zero)
    given = {key: value for key, value in document.items() if value != "auto" or key not in both}
    return {**given, **{key: asked for key, (_, asked) in sizes.items()}}


def _document(path: str | None) -> dict[str, Any]:
    if path is None:
        _end(
            say(
                en="--deepspeed_config FILE is missing, DeepSpeed's JSON file: ds_config_zero2.json beside the program "
                "is one.",
                fr="il manque --deepspeed_config FICHIER, le JSON de DeepSpeed : ds_config_zero2.json, à côté du "
                "programme, en est un.",
            )
        )
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        _end(
            say(
                en=f"--deepspeed_config {path} cannot be read ({why}): ds_config_zero2.json beside the program is one "
                "that can.",
                fr=f"--deepspeed_config {path} ne peut pas être lu ({why}) : ds_config_zero2.json, à côté du "
                "programme, peut l’être.",
            )
        )
    if not isinstance(document, dict):
        _end(
            say(
                en=f"--deepspeed_config {path} must hold a JSON object, {{…}}.",
                fr=f"--deepspeed_config {path} doit contenir un objet JSON, {{…}}.",
            )
        )
    return document


def _differ(path: str, key: str, said: object, option: str, asked: object) -> NoReturn:
    _end(
        say(
            en=f"{path} says {key}: {said}, and the command line {option}: {asked}; change one of them, or leave it "
            "out of the file.",
            fr=f"{path} dit {key} : {said}, et la ligne de commande {option} : {asked} ; changez l’un des deux, ou "
            "retirez-le du fichier.",
        )
    )


def _end(sentence: str) -> NoReturn:
    raise SystemExit(sentence)
