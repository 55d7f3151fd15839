"""Commands `dlojz memory` and `dlojz models`.

`dlojz memory`: will it fit, and what fills it?

Nothing is run and nothing allocated; a file that cannot be written is refused before anything is printed.

`dlojz models`: the catalogue.

Every figure was counted on the model itself, on the meta device; torch is not loaded to tell it.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dlojz import models
from dlojz.base.errors import LabError
from dlojz.base.language import format_count, say
from dlojz.base.table import Table
from dlojz.cli import main
from dlojz.cli.options import (
    Flag,
    answering,
    config_of,
    json_flag,
    number,
    parse,
    predicting_flags,
    target_device,
    tell,
)
from dlojz.config.run_config import RunConfig
from dlojz.display.tables import DASH
from dlojz.hardware import DEVICES, Device, device

if TYPE_CHECKING:
    from dlojz.planner.levers import Fit, Lever
    from dlojz.prediction.forecast import Beside, Forecast

HELP = {
    "en": """Say what the memory of one rank holds, before anything is run: will it fit, and what fills it?

Tells the rank that takes most: its peak and the moment of it, by category, by block and by module; what is allocated,
reserved and shown by nvidia-smi; beside it the field's rules of thumb and the papers' formulas. --fit finds the largest
micro-batch that fits into a GPU, and what each lever would save (checkpointing, ZeRO, offload, precision, tp, pp).
Layouts that no engine runs yet are predicted too. Nothing is allocated: a model of 400 billion parameters will do.

Examples:
  dlojz memory coatnet_tiny --dp 2                             (what a run on this machine will hold)
  dlojz memory coatnet_7 --dp 8 --micro-batch 4 --fit v100-32
  dlojz memory gpt2_xl --dp 8 --zero 2 --engine deepspeed --precision bf16 --fit a100-80 --png gpt2.png
  dlojz memory llama_3_70b --tp 8 --pp 4 --device h100 --json
  dlojz memory vit_b_16 --device a100-40 --snapshot vit.html  (open it in a browser)""",
    "fr": """Dire avant toute exécution ce que contient la mémoire d’un rang : tient-elle, et qu’est-ce qui la remplit ?

Décrit le rang le plus chargé : son pic et le moment de ce pic, par catégorie, par bloc et par module ; ce qui est
alloué, réservé et vu par nvidia-smi ; à côté, les règles usuelles et les formules des articles. --fit cherche le plus
grand micro-batch qui tient sur un GPU, et ce que chaque levier économiserait (points de contrôle, ZeRO, déchargement,
précision, tp, pp). Les découpages qu’aucun moteur n’exécute encore sont prédits aussi. Rien n’est alloué : un modèle de
400 milliards de paramètres convient.

Exemples :
  dlojz memory coatnet_tiny --dp 2                             (ce que contiendra une exécution sur cette machine)
  dlojz memory coatnet_7 --dp 8 --micro-batch 4 --fit v100-32
  dlojz memory gpt2_xl --dp 8 --zero 2 --engine deepspeed --precision bf16 --fit a100-80 --png gpt2.png
  dlojz memory llama_3_70b --tp 8 --pp 4 --device h100 --json
  dlojz memory vit_b_16 --device a100-40 --snapshot vit.html  (à ouvrir dans un navigateur)""",
}


def memory_command(words: list[str]) -> int:
    """Tell the memory of a configuration."""
    given = parse("memory", say(**HELP), _flags(), words)
    fit_device = device(given["fit"]) if "fit" in given else None
    target = target_device(given) or (fit_device if "device" not in given else None)
    config = _config(given)
    as_json = given.get("json", False)
    with answering(as_json) as answer:
        from dlojz.prediction.forecast import forecast, heaviest

        rank = number(given, "rank")
        told = heaviest(config, target) if rank is None else forecast(config, rank, target)
        fit, levers = _advice(config, fit_device) if fit_device else (None, ())
        _write_files(told, fit_device, given)
        if as_json:
            answer(_document(told, fit_device, fit, levers))
        else:
            _print(answer, told, fit_device, fit, levers)
    return main.DONE


def _flags() -> list[Flag]:
    return [
        Flag(
            "words",
            say(
                en="model of the catalogue, like --model (see `dlojz models`)",
                fr="modèle du catalogue, comme --model (voir `dlojz models`)",
            ),
            metavar="[MODEL]",
            kind="words",
        ),
        *predicting_flags(),
        Flag(
            "fit",
            say(
                en="find the largest micro-batch that fits into this GPU, and what each lever saves",
                fr="chercher le plus grand micro-batch qui tient sur ce GPU, et ce que chaque levier économise",
            ),
            metavar="|".join(DEVICES),
        ),
        Flag(
            "rank",
            say(en="rank whose memory is told", fr="rang dont on donne la mémoire"),
            metavar="INT",
            default=say(en="the one that takes most", fr="le plus chargé"),
        ),
        Flag("png", say(en="picture to write (.png, .svg, .pdf)", fr="image à écrire (.png, .svg, .pdf)"), "FILE"),
        Flag(
            "snapshot",
            say(
                en="the step as a memory snapshot in torch's viewer, .html",
                fr="le pas sous forme d’instantané mémoire dans la visionneuse de torch, .html",
            ),
            "FILE",
        ),
        json_flag(),
    ]


def _config(given: dict[str, Any]) -> RunConfig:
    """The configuration; the model may stand alone, without `--model`."""
    names = given.get("words", ())
    if len(names) > 1 or (names and given.get("model", names[0]) != names[0]):
        received = [*names, *([given["model"]] if "model" in given else [])]
        raise LabError(
            say(
                en=f"`dlojz memory` takes one model, but {', '.join(map(repr, received))} were received: name one.",
                fr=f"`dlojz memory` prend un modèle, mais {', '.join(map(repr, received))} ont été reçus : "
                "n’en nommez qu’un.",
            )
        )
    return config_of({**given, **({"model": names[0]} if names else {})})


def _advice(config: RunConfig, target: Device) -> tuple[Fit, tuple[Lever, ...]]:
    from dlojz.planner.levers import largest_batch, levers

    return largest_batch(config, target), levers(config, target)


def _write_files(told: Forecast, fit_device: Device | None, given: dict[str, Any]) -> None:
    if "png" in given:
        from dlojz.display.figures.run_figures import footprint_figure

        footprint_figure(told, given["png"], limit_bytes=fit_device.memory_bytes if fit_device else None)
        tell(say(en=f"figure: {given['png']}", fr=f"figure : {given['png']}"))
    if "snapshot" in given:
        from dlojz.prediction.allocator import write_snapshot

        labels = [(what, phase.rstrip(")")) for what, _, phase in (m.label.rpartition(" (") for m in told.movements)]
        limit = told.device.allocatable_bytes(told.config.layout.world_size) if told.device else None
        write_snapshot(given["snapshot"], told.events, labels, limit_bytes=limit)
        tell(
            say(
                en=f"snapshot: {given['snapshot']} (open it in a browser)",
                fr=f"instantané : {given['snapshot']} (à ouvrir dans un navigateur)",
            )
        )


def _print(answer: Any, told: Forecast, fit_device: Device | None, fit: Fit | None, levers: tuple[Lever, ...]) -> None:
    from dlojz.display import memory_tables as sheet
    from dlojz.display.memory_tables import fit_sentence, headline, peak_sentence
    from dlojz.display.tables import parts_table
    from dlojz.planner.levers import taken_bytes
    from dlojz.prediction.forecast import forms_beside, heaviest, rules_beside, states_per_parameter
    from dlojz.prediction.shapes import model_shapes

    parameters = model_shapes(told.config).num_parameters
    parts = [*sheet.forecast_parts(told)]
    parts.append(sheet.rules_part(rules_beside(told), states_per_parameter(told), parameters))
    if forms := forms_beside(told):
        parts.append(sheet.forms_part(forms))
    if fit_device:
        now = taken_bytes(heaviest(told.config, fit_device))
        parts.append(sheet.levers_part(levers, now, fit_device.memory_bytes))
    answer(headline(told))
    answer(peak_sentence(told) + "\n")
    answer(parts_table(parts))
    if fit and fit_device:
        answer("\n" + fit_sentence(fit, fit_device.title))


def _document(told: Forecast, fit_device: Device | None, fit: Fit | None, levers: tuple[Lever, ...]) -> dict[str, Any]:
    """Everything as plain JSON data."""
    from dlojz.planner.levers import taken_bytes
    from dlojz.prediction.forecast import forms_beside, rules_beside, states_per_parameter

    document: dict[str, Any] = {
        "config": told.config.to_dict(),
        "rank": told.rank,
        "device": told.device.name if told.device else "cpu",
        "memory": told.memory.to_dict(),
        "moment": told.moment,
        "micro_batches_in_flight": told.in_flight,
        "taken_bytes": taken_bytes(told),
        "limit_bytes": told.device.memory_bytes if told.device else None,
        "fits": taken_bytes(told) <= told.device.memory_bytes if told.device else None,
        "at_peak_by_block": [{"block": name, "bytes": held} for name, held in told.at_peak_by_block],
        "activations_by_module": dict(told.activations_by_module),
        "states_bytes_per_parameter": states_per_parameter(told),
        "rules": [_beside(each) for each in rules_beside(told)],
        "closed_forms_of_one_layer": [_beside(each) for each in forms_beside(told)],
    }
    if fit and fit_device:
        document["fit"] = {
            "device": fit_device.name,
            "micro_batch": fit.micro_batch,
            "taken_bytes": fit.taken_bytes,
            "limit_bytes": fit.limit_bytes,
        }
        document["levers"] = [
            {
                "name": lever.name,
                "change": lever.change,
                "taken_bytes": lever.taken_bytes,
                "saved_bytes": lever.saved_bytes,
                "host_bytes": lever.host_bytes,
                "fits": lever.taken_bytes <= fit_device.memory_bytes,
                "runnable": lever.runnable,
                "config": lever.config.to_dict(),
            }
            for lever in levers
        ]
    return document


def _beside(each: Beside) -> dict[str, Any]:
    return {
        "name": each.name,
        "formula": each.formula,
        "about": each.about,
        "source": each.source,
        "formula_bytes": each.formula_bytes,
        "forecast_bytes": each.forecast_bytes,
        "difference": each.difference,
    }


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
            return main.DONE
        titles = (
            say(en="model", fr="modèle"),
            say(en="parameters", fr="paramètres"),
            say(en="active", fr="actifs"),
            "FLOPs",
            say(en="multiply-adds", fr="mult.-additions"),
            say(en="input", fr="entrée"),
            say(en="blocks", fr="blocs"),
        )
        rows = []
        for model in described:
            size = f"{model.image_size}²" if model.image_size else DASH
            if model.sequence_length:
                size = f"{model.sequence_length} tokens"
            rows.append(
                (
                    model.name,
                    format_count(model.parameters),
                    format_count(model.active_parameters) if model.active_parameters < model.parameters else DASH,
                    format_count(model.flops),
                    format_count(model.multiply_adds),
                    size,
                    str(model.blocks),
                )
            )
        answer(Table(titles, tuple(rows), whole=1))
    return main.DONE
