"""Commands `dlojz memory` and `dlojz models`: nothing is run and nothing allocated."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from dlojz.base.errors import LabError
from dlojz.base.language import format_count, integer, say, size_bytes
from dlojz.base.table import Table, visible
from dlojz.cli.options import (
    WORDS,
    Answer,
    Given,
    assumed_fields,
    check_needs,
    config_of,
    fields_of,
    phrase,
    target_device,
    tell_written,
    verb,
)
from dlojz.hardware.gpus import DEVICES, device

if TYPE_CHECKING:
    from dlojz.config.run_config import RunConfig
    from dlojz.hardware import Device
    from dlojz.planner.activation_budget import BudgetPlan
    from dlojz.planner.levers import Fit, Lever
    from dlojz.prediction.forecast import Forecast
    from dlojz.results.footprint import Footprint


@verb("memory", devices="|".join(DEVICES))
def memory_command(args: Given, answer: Answer) -> None:
    """Forecast the memory of a configuration; a file that cannot be written is refused before anything is printed."""
    check_needs(args, "gpus", "from")
    from_document: dict[str, Any] = {}
    if args["from"]:
        args, from_document = _with_file(args, answer)
    fit_device = device(args["fit"]) if "fit" in args else None
    # --fit names a GPU too: the forecast is for that one unless --device names another.
    target = target_device(args) or (fit_device if "device" not in args else None)
    assumed = assumed_fields(args, target)
    config = config_of(args, **assumed)
    if "budget" in args:
        _budget(config, target, assumed, args, answer)
        return
    from dlojz.display.tables import messages_table
    from dlojz.prediction.forecast import forecast, heaviest

    # Without --rank, the rank that takes most memory: it decides whether the layout fits.
    estimate = heaviest(config, target) if args["rank"] is None else forecast(config, args["rank"], target)
    fit, levers = _advice(config, fit_device or target, is_asked=fit_device is not None)
    _write_files(estimate, fit_device, args)
    messages = messages_of(config, estimate.rank, target) if args["from"] else None
    if args["json"]:
        more = {"compiled": compiled_range(estimate)} if args["compile"] else {}
        more |= {} if messages is None else {"communication": messages.to_dict()["communication"]}
        answer({**_document(estimate, fit, levers, assumed), **more, **from_document})
        return
    _print(answer, estimate, fit, levers, assumed)
    if messages is not None:
        answer("")
        answer(messages_table(messages))
    if args["compile"]:
        from dlojz.display.memory_tables import compiled_sentence

        answer("\n" + compiled_sentence(estimate))


def messages_of(config: RunConfig, rank: int = 0, target: Device | None = None) -> Footprint | None:
    """Predict what a rank of another program's run sends, without the lab's own control messages; None of one rank."""
    from dlojz.prediction import predict

    if config.layout.world_size == 1:
        return None
    footprint = predict(config, rank, target)
    sent = tuple(traffic for traffic in footprint.communication if traffic.group != "control")
    return footprint.model_copy(update={"communication": sent})


def compiled_range(estimate: Forecast) -> dict[str, Any]:
    """Write the range of a compiled step's peak as plain data, with whether it fits; null: it depends, or no GPU."""
    return {**estimate.compiled._asdict(), "fits": estimate.compiled.fits}


def _with_file(args: Given, answer: Answer) -> tuple[Given, dict[str, Any]]:
    """Add what another program's configuration says to the options, which hold before it.

    Returns:
        the options, and for JSON what the keys of the file mean and what was assumed.

    Raises:
        LabError: if the program itself would stop, or its run is none that is traced here.
    """
    from dlojz.config.foreign_configs.foreign_documents import sentence
    from dlojz.config.foreign_configs.foreign_meaning import foreign_run, read_foreign
    from dlojz.display.plan_tables import foreign_keys_table
    from dlojz.planner.planned_model import OF_THE_LAB

    config = read_foreign(args["from"])
    if not args["json"]:
        answer(foreign_keys_table(config))
    overrides = {name: args[name] for name in ("gpus", "model", "sequence_length", "micro_batch") if name in args}
    run = foreign_run(config, **overrides)
    if run.failures or run.undescribed:
        raise LabError(" ".join(run.sentences()))
    if "model" not in run.size or run.layout["engine"] not in OF_THE_LAB or "zero_shards" in run.columns:
        raise phrase.refused("traced for the catalogue only", name=config.document.name)
    # What the cost model has and the traced step has not.
    usual = {"fused_loss": (None, False), "fused_attention": (None, True), "fp8": (None, False)}
    if lacking := [config.said(name) for name, values in usual.items() if config.fields.get(name) not in values]:
        run = replace(run, assumed=(*run.assumed, sentence("left_out", keys=", ".join(lacking))))
    for text in () if args["json"] else run.sentences():
        answer("\n" + text)
    compiled = {"compile": True} if run.columns.get("compiled") else {}
    document = {"from": {**config.as_dict(), "run": run.as_dict()}}
    return Given({**run.run_fields(), **compiled, **args}, args.defaults), document


def _budget(config: RunConfig, target: Device | None, assumed: dict[str, Any], args: Given, answer: Answer) -> None:
    """Choose what becomes of each block's activations, and print or write the choice."""
    if "fit" in args:
        raise phrase.refused("budget or largest batch")
    budget_bytes = _bytes_of(args["budget"])
    from dlojz.config.run_config import command_of
    from dlojz.display import memory_tables as sheet
    from dlojz.planner.activation_budget import plan_activations
    from dlojz.prediction.forecast import check_rank

    rank = args["rank"] or 0
    check_rank(config, rank)
    plan = plan_activations(config, budget_bytes, rank, target)
    _write_files(plan.forecast, None, args, plan)
    if args["json"]:
        # What a step takes more than with everything kept: seconds, FLOPs of recomputation, bytes moved.
        seconds, flops, moved_bytes = plan.tables.costs(plan.choices)
        costs = {"seconds": seconds, "flops": flops, "moved_bytes": moved_bytes}
        budget = {"limit_bytes": budget_bytes, "kept_peak_bytes": plan.kept_peak_bytes, "added": costs}
        answer({**_document(plan.forecast, None, None, assumed), "budget": budget})
        return
    if assumed:
        answer(sheet.assumed_sentence(plan.config, assumed))
    answer(sheet.headline(plan.forecast))
    answer(sheet.budget_sentence(plan) + "\n")
    answer(sheet.budget_part(plan))
    answer("\n" + say(en="To run it: ", fr="Pour l’exécuter : ") + command_of(plan.config))


def _bytes_of(word: str) -> int:
    """Parse a size such as `30GiB` (powers of 1,024), `30GB` (powers of 1,000) or bytes without a unit.

    Raises:
        LabError: if it is none.
    """
    size = size_bytes(word)
    if size is None:
        raise phrase.refused("size of a budget", word=word)
    return size


def _advice(config: RunConfig, limit: Device | None, *, is_asked: bool) -> tuple[Fit | None, tuple[Lever, ...] | None]:
    """Find the largest batch that fits into a GPU, and the levers where they are asked for or not one sample fits."""
    from dlojz.planner.levers import largest_batch, levers

    if limit is None:
        return None, None
    try:
        fit = largest_batch(config, limit)
    except LabError:
        if is_asked:
            raise
        return None, None  # the batch that was asked about has its forecast; another one has none
    return fit, levers(config, limit) if is_asked or not fit.micro_batch else None


def _write_files(estimate: Forecast, fit_device: Device | None, args: Given, plan: BudgetPlan | None = None) -> None:
    if "png" in args:
        from dlojz.display.figures.run_figures import activation_curve_figure, footprint_figure

        if plan is not None:
            activation_curve_figure(plan, args["png"])
        else:
            footprint_figure(estimate, args["png"], limit_bytes=fit_device.memory_bytes if fit_device else None)
        tell_written(args["png"])
    if "snapshot" in args:
        from dlojz.prediction.allocator import write_snapshot

        # A label reads `what (phase)`; the snapshot takes the two apart.
        labels = [
            (label, phase.rstrip(")")) for label, _, phase in (m.label.rpartition(" (") for m in estimate.movements)
        ]
        # Bytes that torch's allocator may take of the GPU; None: the CPU sets no limit.
        limit = estimate.device.allocatable_bytes(estimate.config.layout.world_size) if estimate.device else None
        write_snapshot(args["snapshot"], estimate.events, labels, limit_bytes=limit, streams=estimate.streams)
        note = say(en=" (open it in a browser)", fr=" (à ouvrir dans un navigateur)")
        tell_written(args["snapshot"], "snapshot", "instantané", note)


def _print(
    answer: Answer, estimate: Forecast, fit: Fit | None, levers: tuple[Lever, ...] | None, assumed: dict[str, Any]
) -> None:
    from dlojz.display import memory_tables as sheet
    from dlojz.planner.levers import taken_bytes
    from dlojz.prediction.forecast import forms_beside, heaviest, rules_beside, states_per_parameter
    from dlojz.prediction.shapes import model_shapes

    parameters = model_shapes(estimate.config).num_parameters
    parts = [*sheet.forecast_parts(estimate)]
    if rules := rules_beside(estimate):
        parts.append(sheet.rules_part(rules, states_per_parameter(estimate), parameters))
    if forms := forms_beside(estimate):
        parts.append(sheet.forms_part(forms))
    if fit and levers is not None:
        current_bytes = taken_bytes(heaviest(estimate.config, fit.forecast.device))
        parts.append(sheet.levers_part(levers, current_bytes, fit.limit_bytes))
    if assumed:
        answer(sheet.assumed_sentence(estimate.config, assumed))
    if estimate.device and estimate.device.default_words:
        answer(estimate.device.default_words)
    answer(sheet.headline(estimate))
    answer(sheet.peak_sentence(estimate) + "\n")
    for index, part in enumerate(parts):
        if index:
            answer("")
        answer(part)
    if fit and fit.forecast.device:
        answer("\n" + sheet.fit_sentence(fit, fit.forecast.device.title))


def _document(
    estimate: Forecast, fit: Fit | None, levers: tuple[Lever, ...] | None, assumed: dict[str, Any]
) -> dict[str, Any]:
    """Write the forecast as plain JSON data."""
    from dlojz.planner.levers import taken_bytes
    from dlojz.prediction.forecast import forms_beside, rules_beside, states_per_parameter

    document: dict[str, Any] = {
        "config": estimate.config.to_dict(),
        "assumed": assumed,
        "rank": estimate.rank,
        "device": estimate.device.name if estimate.device else "cpu",
        "class_defaults": list(estimate.device.left_out) if estimate.device else [],
        "memory": estimate.memory.to_dict(),
        "expandable_reserved_bytes": estimate.expandable_reserved_bytes,
        "moment": estimate.moment,
        "notes": list(estimate.notes),
        "micro_batches_in_flight": estimate.in_flight,
        "taken_bytes": taken_bytes(estimate),
        "limit_bytes": estimate.device.memory_bytes if estimate.device else None,
        "fits": taken_bytes(estimate) <= estimate.device.memory_bytes if estimate.device else None,
        "at_peak_by_block": [{"block": name, "bytes": num_bytes} for name, num_bytes in estimate.at_peak_by_block],
        "activations_by_module": dict(estimate.activations_by_module),
        "states_bytes_per_parameter": states_per_parameter(estimate),
        "rules": [{**asdict(rule), "difference": rule.difference} for rule in rules_beside(estimate)],
        "closed_forms_of_one_layer": [
            {**asdict(form), "difference": form.difference} for form in forms_beside(estimate)
        ],
    }
    if fit and fit.forecast.device:
        document["fit"] = {
            "device": fit.forecast.device.name,
            **fields_of(fit, "micro_batch", "taken_bytes", "limit_bytes"),
        }
    if fit and levers is not None:
        document["levers"] = [
            {
                **fields_of(lever, "name", "change", "taken_bytes", "saved_bytes", "host_bytes", "runnable"),
                "fits": lever.taken_bytes <= fit.limit_bytes,
                "config": lever.config.to_dict(),
            }
            for lever in levers
        ]
    return document


@verb("models")
def models_command(args: Given, answer: Answer) -> None:
    """List the models."""
    from dlojz import models
    from dlojz.display.tables import DASH

    described = [models.describe(name) for name in args[WORDS] or models.names()]
    if args["json"]:
        answer([asdict(model) for model in described])
        return
    head = phrase.titles("columns of models")
    rows = []
    for model in described:
        size = f"{model.image_size}²" if model.image_size else DASH
        active = format_count(model.active_parameters) if model.active_parameters < model.parameters else DASH
        rows.append(
            (
                model.name,
                format_count(model.parameters),
                active,
                format_count(model.flops),
                format_count(model.multiply_adds),
                f"{model.sequence_length} tokens" if model.sequence_length else size,
                integer(model.num_classes) if model.num_classes is not None else DASH,
                str(model.blocks),
            )
        )
    note = phrase("models of your own")
    abouts = [f"{visible(model.name)}: {about}." for model in described if (about := models.about(model.name))]
    answer(Table(head, tuple(rows), whole=1, notes=tuple(abouts) if args[WORDS] else (note,)))
