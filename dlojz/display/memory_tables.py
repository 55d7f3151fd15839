"""Sentences and tables of a memory forecast, for the terminal, the notebook and the calculator.

Only sums, shares and differences of what a forecast holds are computed here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from dlojz import models
from dlojz.base.language import (
    Sentences,
    brief_percent,
    decimal,
    format_bytes,
    format_count,
    format_seconds,
    integer,
    say,
    yes_no,
)
from dlojz.base.table import Table, visible
from dlojz.config.fields import BLOCK_CHOICES
from dlojz.config.run_config import RunConfig
from dlojz.display.style import CATEGORY_STYLES, category_label, label, needed_label
from dlojz.display.tables import beyond_peak
from dlojz.models.catalogue import spec
from dlojz.models.foreign.elsewhere import is_own_file
from dlojz.models.foreign.names import is_elsewhere
from dlojz.planner.levers import Lever, taken_bytes
from dlojz.planner.question import MARGINAL
from dlojz.results.footprint import CATEGORIES

if TYPE_CHECKING:
    from dlojz.config.run_config import RunConfig
    from dlojz.planner.activation_budget import BudgetPlan
    from dlojz.planner.levers import Fit
    from dlojz.prediction.forecast import Beside, Forecast

phrase = Sentences(Path(__file__).parent / "data" / "memory_tables.md", visible=visible)

MOST_BLOCKS = MOST_MODULES = 8
LEFT_OPEN = ("precision", "micro_batch", "sequence_length")
"""Fields that a question about a text model may leave open."""


def difference(share: float) -> str:
    """Write a relative difference, with `=` below a tenth of a percent."""
    return "=" if abs(share) < 5e-4 else brief_percent(share, signed=True)


def block_label(name: str) -> str:
    """Name a block by its path; the empty one holds the model's states and the engine's buffers."""
    return visible(name) if name else say(en="(states, engine, loss)", fr="(états, moteur, perte)")


def assumed_sentence(config: RunConfig, assumed: Collection[str]) -> str:
    """Say what a question about a text model left open, what was assumed, and which options change it.

    Args:
        config: as it was forecast.
        assumed: fields that were not given, of `precision`, `micro_batch` and `sequence_length`.
    """
    tokens, samples, layout = integer(config.sequence_length or 0), config.layout.micro_batch, config.layout
    # Only then does each rank have a micro-batch of its own, and one can say "per GPU".
    one_gpu_per_replica = layout.tp == layout.pp == layout.cp == 1
    en, fr = [], []
    if "precision" in assumed:
        en.append(f"{config.precision} (mixed precision)")
        fr.append(f"{config.precision} (précision mixte)")
    if "micro_batch" in assumed:
        en.append(f"{samples} sample of {tokens} tokens per " + ("GPU" if one_gpu_per_replica else "micro-batch"))
        fr.append(f"{samples} exemple de {tokens} tokens par " + ("GPU" if one_gpu_per_replica else "micro-batch"))
    elif "sequence_length" in assumed:
        en.append(f"{tokens} tokens per sample")
        fr.append(f"{tokens} tokens par exemple")
    options = ", ".join("--" + name.replace("_", "-") for name in LEFT_OPEN if name in assumed)
    return phrase("assumed", assumed_en=", ".join(en), options=options, assumed_fr=", ".join(fr))


def headline(forecast: Forecast) -> str:
    """Name the run, what its model reads, the rank and the device of a forecast; below, the class of transformers."""
    device_title = forecast.device.title if forecast.device else "CPU"
    sentence = phrase("headline", forecast=forecast, sizes=sizes_read(forecast.config), device_title=device_title)
    return "\n".join(filter(None, (sentence, input_sentence(forecast.config))))


def input_sentence(config: RunConfig) -> str:
    """Say which class of transformers is forecast, and its vocabulary or its classes; nothing of other models."""
    title = spec(config.built_model).class_title if is_elsewhere(config.model) and not is_own_file(config.model) else ""
    if config.script or not title:
        return ""
    number = integer(config.num_classes)
    if config.sequence_length:
        title += say(en=f"; vocabulary of {number}", fr=f" ; vocabulaire de {number}")
    elif _has_classes(config):
        title += say(en=f"; {number} classes", fr=f" ; {number} classes")
    if config.layout.checkpointing != "none" and config.model.startswith("hf:"):
        title += phrase("checkpointing around the layers")
    return say(en=f"Model: {title}.", fr=f"Modèle : {title}.")


def _has_classes(config: RunConfig) -> bool:
    """Tell whether a model gives classes; one's own file, which is not executed for it, is taken to."""
    return is_own_file(config.model) or spec(config.model).has_classes


def sizes_read(config: RunConfig) -> str:
    """Name what a model reads and gives, after a comma: the size of images or texts, classes, and what is special."""
    parts = []
    if config.image_size:
        parts.append(f"{config.image_size} × {config.image_size} pixels")
    if config.sequence_length:
        parts.append(f"{integer(config.sequence_length)} tokens")
    if not config.sequence_length and _has_classes(config):
        parts.append(say(en=f"{integer(config.num_classes)} classes", fr=f"{integer(config.num_classes)} classes"))
    about = models.about(config.model)
    return "".join(f", {part}" for part in (*parts, *([about] if about else [])))


def peak_sentence(forecast: Forecast) -> str:
    """Say the peak, its moment and what fills most of it; below, what is not as usual, or not predicted."""
    memory = forecast.memory
    at_peak = memory.at_peak_bytes or {}
    largest_category = max(at_peak, key=lambda name: at_peak[name], default=None)
    filled = ""
    if largest_category is not None and memory.peak_bytes:
        share = brief_percent(at_peak[largest_category] / memory.peak_bytes)
        filled = phrase("largest category at the peak", share=share, category=category_label(largest_category))
    peak = phrase("peak", memory=memory, forecast=forecast, filled=filled)
    return "\n".join((peak, *forecast.notes))


def compiled_sentence(forecast: Forecast) -> str:
    """Say within which bounds the peak of the compiled step is, and whether it fits into a GPU whatever is fused."""
    compiled, device = forecast.compiled, forecast.device
    low, high = format_bytes(compiled.low_bytes), format_bytes(compiled.high_bytes)
    sentence = phrase("compiled", low=low, high=high)
    if device is None or compiled.limit_bytes is None:
        return sentence
    limit = f"{device.title} ({format_bytes(compiled.limit_bytes)})"
    if compiled.fits is None:
        return sentence + phrase("compiled: fitting depends", limit=limit)
    if compiled.fits:
        return sentence + say(en=f" It fits into {limit}.", fr=f" Cela tient sur {limit}.")
    return sentence + say(en=f" It does not fit into {limit}.", fr=f" Cela ne tient pas sur {limit}.")


def verdict(required_bytes: int, limit_bytes: int, title: str) -> str:
    """Say whether it fits, how much is left or missing, and what a nearly full GPU risks."""
    free_bytes = limit_bytes - required_bytes
    if free_bytes >= 0:
        sentence = phrase("fits", title=title, limit_bytes=limit_bytes, free_bytes=free_bytes)
        if required_bytes <= MARGINAL * limit_bytes:
            return sentence
        share = brief_percent(required_bytes / limit_bytes)
        return sentence + phrase("nearly full", share=share)
    return phrase("does not fit", title=title, limit_bytes=limit_bytes, free_bytes=-free_bytes)


def fit_sentence(fit: Fit, title: str) -> str:
    """Say the largest micro-batch that fits."""
    if fit.micro_batch == 0:
        return phrase("not one sample fits", title=title, fit=fit)
    plural = "s" * (fit.micro_batch > 1)
    return phrase("largest micro-batch", title=title, fit=fit, plural=plural)


def _shares_table(caption: str, sizes: Sequence[tuple[str, int]], category: str = "") -> Table:
    """Names and bytes with a bar for each share of their sum."""
    # Only a sum of 0 bytes is replaced: it would be divided by.
    total = sum(num_bytes for _, num_bytes in sizes) or 1
    return Table(
        ("", ""),
        tuple((name, format_bytes(num_bytes)) for name, num_bytes in sizes),
        caption,
        shares=tuple(num_bytes / total for _, num_bytes in sizes),
        colors=(_color(category),) * len(sizes),
    )


def _color(category: str) -> str:
    style = CATEGORY_STYLES.get(category)  # type: ignore[call-overload]
    return style.color if style else ""


def category_part(forecast: Forecast) -> Table:
    """List the categories: at the peak, and the largest within the step."""
    memory = forecast.memory
    at_peak, peak = memory.at_peak_bytes or {}, memory.peak_bytes or 1
    categories = [name for name in CATEGORIES if at_peak.get(name) or memory.category(name)]
    shares = [at_peak.get(name, 0) / peak for name in categories]
    rows = [
        (
            category_label(name),
            format_bytes(at_peak.get(name, 0)),
            brief_percent(share),
            format_bytes(memory.category(name)),
        )
        for name, share in zip(categories, shares, strict=True)
    ]
    return Table(
        ("", say(en="at the peak", fr="au pic"), "", say(en="largest in the step", fr="maximum dans le pas")),
        (*rows, (category_label("peak"), format_bytes(memory.peak_bytes), "", "")),
        say(en="By category", fr="Par catégorie"),
        shares=(*shares, 0.0),
        colors=(*map(_color, categories), ""),
    )


def taken_part(forecast: Forecast) -> Table:
    """List what is allocated, reserved, seen by nvidia-smi and offloaded, and say whether it fits."""
    memory, device = forecast.memory, forecast.device
    rows = [(say(en="allocated", fr="alloué"), format_bytes(memory.peak_bytes))]
    notes: tuple[str, ...] = ()
    if device is not None:
        rows.append((needed_label(), format_bytes(memory.needed_bytes)))
        notes = (verdict(taken_bytes(forecast), device.memory_bytes, device.title),)
        # A GPU given by its size, of which nothing else is known: say what of that size a process gets.
        if device.is_of_size:
            total, context, nccl = map(format_bytes, (device.memory_bytes, device.context_bytes, device.nccl_bytes))
            note = phrase("GPU given by its size", total=total, context=context, nccl=nccl)
            notes = (*notes, note)
    rows += beyond_peak(memory)
    if forecast.expandable_reserved_bytes is not None:
        label = say(en="reserved with expandable_segments:True", fr="réservé avec expandable_segments:True")
        rows.append((label, format_bytes(forecast.expandable_reserved_bytes)))
    return Table(("", ""), tuple(rows), say(en="What a rank takes", fr="Ce que prend un rang"), notes=notes)


def grouped_blocks(forecast: Forecast, max_blocks: int = MOST_BLOCKS) -> list[tuple[str, dict[str, int]]]:
    """Group the blocks by what they hold at the peak, the most first; equal neighbours stand together.

    Returns:
        label and bytes by category; beyond `max_blocks`, the others together.
    """
    runs: list[tuple[list[str], dict[str, int]]] = []
    for name, block_bytes in forecast.at_peak_by_block:
        # Equal neighbours join; the block without a name (states, engine, loss) stays alone.
        as_before = runs and name and runs[-1][0][-1] and runs[-1][1] == block_bytes
        if as_before:
            runs[-1][0].append(name)
        else:
            runs.append(([name], {str(category): num_bytes for category, num_bytes in block_bytes.items()}))
    groups = [
        # What the blocks of a group hold together: number × bytes of one, in each category.
        (
            _group_label(names),
            {category: len(names) * num_bytes for category, num_bytes in block_bytes.items()},
            len(names),
        )
        for names, block_bytes in runs
    ]
    groups.sort(key=lambda group: -sum(group[1].values()))
    max_blocks += len(groups) == max_blocks + 1  # one more is shown by its name
    rows = [(label, group_bytes) for label, group_bytes, _ in groups[:max_blocks]]
    if remaining_groups := groups[max_blocks:]:
        together = {str(name): sum(group[1].get(name, 0) for group in remaining_groups) for name in CATEGORIES}
        number = sum(group[2] for group in remaining_groups)
        rows.append((say(en=f"{number} others", fr=f"{number} autres"), together))
    return rows


def _group_label(names: list[str]) -> str:
    if len(names) == 1:
        return block_label(names[0])
    (first_prefix, _, _), (last_prefix, _, number) = names[0].rpartition("."), names[-1].rpartition(".")
    return f"{visible(names[0])} … {visible(number if first_prefix == last_prefix else names[-1])} (×{len(names)})"


def block_part(forecast: Forecast) -> Table:
    """List what fills the peak by block, the most first."""
    groups = [(label, sum(block_bytes.values())) for label, block_bytes in grouped_blocks(forecast, MOST_BLOCKS)]
    return _shares_table(say(en="What fills the peak, by block", fr="Ce qui remplit le pic, par bloc"), groups)


def module_part(forecast: Forecast) -> Table:
    """List what forward keeps for backward by module, the same module of all blocks together; the most first."""
    sizes_by_module: dict[str, list[int]] = {}
    for path, num_bytes in forecast.activations_by_module.items():
        # A number in the path becomes *: `blocks.3.mlp` and `blocks.7.mlp` are one line.
        sizes_by_module.setdefault(re.sub(r"(?:^|(?<=\.))\d+", "*", path), []).append(num_bytes)
    ordered = sorted(sizes_by_module.items(), key=lambda item: -sum(item[1]))
    # One more is shown by its name: "1 others" would take the same line.
    max_modules = MOST_MODULES + (len(ordered) == MOST_MODULES + 1)
    rows = [
        (_module_label(path) + (f" (×{len(sizes)})" if len(sizes) > 1 else ""), sum(sizes))
        for path, sizes in ordered[:max_modules]
    ]
    if remaining_bytes := [sum(sizes) for _, sizes in ordered[max_modules:]]:
        rows.append(
            (say(en=f"{len(remaining_bytes)} others", fr=f"{len(remaining_bytes)} autres"), sum(remaining_bytes))
        )
    caption = phrase("caption of modules")
    return _shares_table(caption, rows, "activations")


def _module_label(path: str) -> str:
    if path == "blocks.*":
        return say(en="blocks.* themselves", fr="blocks.* eux-mêmes")
    return visible(path) or say(en="(input, loss)", fr="(entrée, perte)")


def rules_part(comparisons: Sequence[Beside], per_parameter: float, parameters: int) -> Table:
    """Compare the rules of thumb with what this rank holds of what they count."""
    amount = decimal(per_parameter, 2)
    caption = phrase("caption of rules", parameters=format_count(parameters), amount=amount)
    return _formulas_table(
        caption, say(en="this rank", fr="ce rang"), [comparison.formula for comparison in comparisons], comparisons
    )


def forms_part(comparisons: Sequence[Beside]) -> Table:
    """Compare the papers' closed forms with the trace of one layer."""
    caption = phrase("caption of closed forms")
    labels = [f"{comparison.name}{say(en=':', fr=' :')} {comparison.formula}" for comparison in comparisons]
    return _formulas_table(caption, say(en="trace", fr="trace"), labels, comparisons)


def _formulas_table(caption: str, measured: str, labels: Sequence[str], comparisons: Sequence[Beside]) -> Table:
    rows = tuple(
        (
            label,
            format_bytes(comparison.formula_bytes),
            format_bytes(comparison.forecast_bytes),
            difference(comparison.difference),
            comparison.about,
        )
        for label, comparison in zip(labels, comparisons, strict=True)
    )
    head = ("", say(en="formula", fr="formule"), measured, say(en="difference", fr="écart"), "")
    return Table(head, rows, caption, align="lrrrl")


def levers_part(levers: Sequence[Lever], now_bytes: int, limit_bytes: int | None = None) -> Table:
    """List what each single change would save, the largest saving first."""
    head = phrase.titles("columns of levers")
    rows = [
        (
            lever.change,
            format_bytes(lever.taken_bytes),
            # A negative saving takes more bytes than now.
            ("−" if lever.saved_bytes < 0 else "") + format_bytes(abs(lever.saved_bytes)),
            brief_percent(lever.saved_bytes / now_bytes) if now_bytes else "",
            format_bytes(lever.host_bytes) if lever.host_bytes else "",
            "" if limit_bytes is None else yes_no(lever.taken_bytes <= limit_bytes),
            yes_no(True) if lever.runnable else say(en="predicted only", fr="prédit seulement"),
        )
        for lever in levers
    ]
    # Columns that are empty in every row are left out, but the first.
    columns = [column for column in range(len(head)) if not column or any(row[column] for row in rows)]
    caption = phrase("caption of levers", now_bytes=now_bytes)
    return Table(
        tuple(head[column] for column in columns), tuple(tuple(row[c] for c in columns) for row in rows), caption
    )


def choice_label(choice: str) -> str:
    """Name what becomes of a block's activations (a word of `BLOCK_CHOICES`)."""
    return label("choice", choice)


def budget_sentence(plan: BudgetPlan) -> str:
    """Say the budget, the peak under it, and what a step pays for it."""
    seconds, flops, moved_bytes = plan.tables.costs(plan.choices)
    peak, upper = format_bytes(plan.peak_bytes), format_bytes(plan.kept_peak_bytes)
    paid, recomputed_flops, copied = format_seconds(seconds), format_count(flops, "FLOP"), format_bytes(moved_bytes)
    return phrase(
        "budget", plan=plan, peak=peak, upper=upper, paid=paid, recomputed_flops=recomputed_flops, copied=copied
    )


def budget_part(plan: BudgetPlan) -> Table:
    """List the choice for each block; neighbours with equal choices stand together."""
    tables, rows, start = plan.tables, [], 0
    # groupby: runs of neighbours with one choice; `start` to `end` are their numbers.
    for choice, run in groupby(plan.choices):
        end = start + len(list(run))
        # Arrays of blocks × choices: the rows of this run, the column of its choice.
        block = slice(start, end), choice
        rows.append(
            (
                f"blocks.{start}" + (f" … {end - 1} (×{end - start})" if end - start > 1 else ""),
                choice_label(BLOCK_CHOICES[choice]),
                format_bytes(tables.held[1][block].sum()),
                format_count(tables.flops[block].sum(), "FLOP"),
                format_bytes(tables.moved_bytes[block].sum()),
                format_seconds(tables.seconds[block].sum()),
            )
        )
        start = end
    head = phrase.titles("columns of a budget")
    # FLOP/s, then bytes per second: of the device's memory, of copies to the host.
    computed, *memory = tables.speeds
    memory_rate, copied = (format_count(speed, say(en="B/s", fr="o/s")) for speed in memory[:2])
    rate, waited = format_count(computed, "FLOP/s"), brief_percent(tables.speeds.exposed)
    note = phrase("speeds of a budget", rate=rate, memory_rate=memory_rate, copied=copied, waited=waited)
    return Table(head, tuple(rows), say(en="Choice per block", fr="Choix par bloc"), align="llrrrr", notes=(note,))


def forecast_parts(forecast: Forecast) -> tuple[Table, ...]:
    """List the tables that every view of a forecast shows."""
    return category_part(forecast), taken_part(forecast), block_part(forecast), module_part(forecast)
