"""`dlojz models`: the catalogue.

Layer 6. Invariant: every figure is counted from the model itself, on the meta device.
"""

from __future__ import annotations

from dataclasses import asdict

from rich.table import Table

from dlojz import cli, models
from dlojz.cli.answer import answering
from dlojz.cli.flags import json_flag, parse
from dlojz.text import say
from dlojz.units import format_count
from dlojz.viz.grid import DASH


def models_command(words: list[str]) -> int:
    """List the models."""
    given = parse(
        "models",
        say(
            en="""List the models: parameters, those of a mixture of experts that one token meets (active),
FLOPs of the forward pass of one sample, multiply-adds (what papers on vision print as FLOPs), input (pixels or
tokens), blocks. Everything is counted, nothing is allocated.

Examples:
  dlojz models
  dlojz models --json""",
            fr="""Lister les modèles : paramètres, ceux d'un mélange d'experts que rencontre un token (actifs),
FLOPs de la passe avant d'un exemple, multiplications-additions (ce que les articles de vision appellent FLOPs), entrée
(pixels ou tokens), blocs. Tout est compté, rien n'est alloué.

Exemples :
  dlojz models
  dlojz models --json""",
        ),
        [json_flag()],
        words,
    )
    with answering(given.get("json", False)) as answer:
        described = [models.describe(name) for name in models.names()]
        if given.get("json"):
            answer([asdict(model) for model in described])
            return cli.DONE
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column(say(en="model", fr="modèle"), no_wrap=True)
        for title in (
            say(en="parameters", fr="paramètres"),
            say(en="active", fr="actifs"),
            "FLOPs",
            say(en="multiply-adds", fr="mult.-additions"),
            say(en="input", fr="entrée"),
            say(en="blocks", fr="blocs"),
        ):
            table.add_column(title, justify="right", no_wrap=True)
        for model in described:
            size = f"{model.image_size}²" if model.image_size else DASH
            if model.sequence_length:
                size = f"{model.sequence_length} tokens"
            table.add_row(
                model.name,
                format_count(model.parameters),
                format_count(model.active_parameters) if model.active_parameters < model.parameters else DASH,
                format_count(model.flops),
                format_count(model.multiply_adds),
                size,
                str(model.blocks),
            )
        answer(table)
    return cli.DONE
