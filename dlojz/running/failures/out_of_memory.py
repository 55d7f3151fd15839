"""Explain a run out of memory: what filled it, the limit, and the cheapest levers.

The text says which figures were measured and which are predicted; a lever is proposed with its effect on this run and
the command that tries it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dlojz.base.errors import LabError
from dlojz.base.language import Sentences, format_bytes, refusal, say, significant
from dlojz.base.table import Table, visible
from dlojz.config.run_config import command_of
from dlojz.display.style import category_label, phase_label
from dlojz.display.tables import status_label
from dlojz.models.foreign.elsewhere import executing_no_file
from dlojz.results.footprint import Memory
from dlojz.results.record import OTHERS, REST, ModuleMemory, RunRecord, memory_growth
from dlojz.running.state import RunFolder

if TYPE_CHECKING:
    from dlojz.hardware import Device
    from dlojz.planner.levers import Lever

phrase = Sentences(Path(__file__).parent / "data" / "out_of_memory.md", visible=visible)


_LEVERS: Final[dict[str, dict[str, Any]]] = tomllib.loads(
    (Path(__file__).parent / "data" / "levers.toml").read_text(encoding="utf-8")
)
"""Of each lever its price, the cheapest first; of one that a script has also the change, and the line that makes it."""
CHEAPEST_FIRST = tuple(_LEVERS)


def cost(name: str) -> str:
    """Return the price of a lever, in words; empty for one that is not known."""
    return say(**_LEVERS[name]["price"]) if name in _LEVERS else ""


def command(lever: Lever) -> str:
    """Write the command that tries a lever: a run, a prediction where no engine runs it yet, a line of a script."""
    if lever.config.script:
        return str(_LEVERS[lever.name]["code"])
    return command_of(lever.config, "run" if lever.runnable else "memory")


def memory_lines(report: PostMortem) -> list[str]:
    """Write the memory by category, the limit, and the cheapest levers with their effect, line by line."""
    memory = report.memory
    lines = [in_one_line(report)]
    categories = sorted((memory.at_peak_bytes or {}).items(), key=lambda item: -item[1])
    rows = tuple((f"  {category_label(name)}", format_bytes(num_bytes)) for name, num_bytes in categories if num_bytes)
    lines += str(Table(("", ""), rows)).splitlines()
    lines += module_lines(report)
    growth = memory_growth(report.record.held_bytes)
    if growth is not None:
        lines += ["", say(en=f"But {growth.text()}", fr=f"Mais {growth.text()}")]
    elif report.limit_bytes and not report.limit_explains and report.exceeds_at_once:
        request, source = format_bytes(report.asked_bytes), say(en="measured", fr="mesuré")
        if not report.measured:
            source = say(en="predicted", fr="prédit")
        lines += ["", phrase("one request too large", request=request, source=source)]
    elif report.limit_bytes and not report.limit_explains:
        lines += ["", phrase("well below the limit")]
    # What is kept from step to step is what to look for: a smaller step only puts off the end.
    return lines if growth is not None else [*lines, "", *_lever_lines(report)]


def module_lines(report: PostMortem) -> list[str]:
    """Write the modules that hold most at the predicted peak; none where that is not known."""
    if not report.modules:
        return []
    rows = []
    for module in report.modules[:MODULES_SHOWN]:
        categories = sorted(module.bytes_by_category.items(), key=lambda item: -item[1])
        parts = ", ".join(
            f"{category_label(name)} {format_bytes(num_bytes)}" for name, num_bytes in categories if num_bytes
        )
        name = module.module or say(en="outside of the model (loss, buckets)", fr="hors du modèle (loss, buckets)")
        if name == REST:
            name = say(en="(rest of the model)", fr="(reste du modèle)")
        elif name == OTHERS:
            name = say(en="(other models)", fr="(autres modèles)")
        rows.append((f"  {visible(name)}", format_bytes(sum(module.bytes_by_category.values())), parts))
    remaining_bytes = sum(sum(module.bytes_by_category.values()) for module in report.modules[MODULES_SHOWN:])
    if remaining_bytes:
        rows.append((say(en="  all others", fr="  tous les autres"), format_bytes(remaining_bytes), ""))
    heading = say(en="By module at the peak (predicted):", fr="Par module au pic (prédit) :")
    return ["", heading, *str(Table(("", "", ""), tuple(rows), align="lrl")).splitlines()]


def in_one_line(report: PostMortem) -> str:
    """Write what the fullest rank holds at its peak, and how much of the limit that is."""
    memory, phase = report.memory, phase_label(visible(report.memory.peak_moment or ""))
    source = (
        say(en="measured in an earlier step", fr="mesuré à un pas précédent")
        if report.measured and report.out_of_memory
        else say(en="measured", fr="mesuré")
        if report.measured
        else say(en="predicted, as nothing was measured", fr="prédit, car rien n’a été mesuré")
    )
    limit = ""
    if report.limit_bytes:
        share = significant(100 * report.taken_bytes / report.limit_bytes, 2)
        limit = phrase("share of the limit", report=report, share=share)
    return phrase("peak in one line", report=report, memory=memory, phase=phase, source=source, limit=limit)


def _lever_lines(report: PostMortem) -> Iterator[str]:
    if report.no_levers:
        yield report.no_levers[0].upper() + report.no_levers[1:]
        return
    predicted = report.record.script_prediction
    if not report.levers and predicted and predicted.levers:
        yield phrase("no lever for a script")
        return
    if not report.levers and report.record.config.script:
        yield phrase("no lever predicted")
        return
    if not report.levers:
        yield phrase("no single lever")
        return
    yield phrase("cheapest levers")
    enough, short = say(en=", fits", fr=", tient"), say(en=", not enough alone", fr=", ne suffit pas seul")
    for number, lever in enumerate(report.levers, 1):
        fits = {True: enough, False: short, None: ""}[report.fits(lever)]
        mark = "" if lever.runnable else say(en=" [predicted only]", fr=" [prédit seulement]")
        yield phrase("lever", number=number, lever=lever, fits=fits, mark=mark)
        yield "     " + say(en="costs: ", fr="coût : ") + cost(lever.name)
        yield f"     {command(lever)}"


LEVERS_SHOWN = 3
MODULES_SHOWN = 6
WORTH = 0.02
"""Share of what is taken that a lever has to save to be proposed."""
_ASKED = re.compile(r"tried to allocate ([\d.]+) ?(?:([KMGT])iB|bytes)", re.IGNORECASE)
"""In the message of torch's allocator on the CPU (`you tried to allocate 4096 bytes`), and on CUDA (`2.00 GiB`)."""
NEAR = 0.7
"""Share of the limit from which a peak explains that memory ran out; the process itself and caches take the rest."""


@dataclass(frozen=True)
class PostMortem:
    """Memory of the fullest rank of a run, its limit and the levers.

    Args:
        out_of_memory: whether it ended for lack of memory.
        measured: whether `memory` was measured; it is predicted otherwise.
        rank: the fullest one known.
        limit_bytes, limit_of: limit of a rank, and whose limit that is; None where it is not known.
        levers: the cheapest that help, those that can be run first; only for a run out of memory.
        no_levers: why none could be predicted; empty where they were.
        modules: of a script, at its predicted peak, the largest first.
    """

    record: RunRecord
    out_of_memory: bool
    measured: bool
    rank: int
    memory: Memory
    limit_bytes: int | None
    limit_of: str
    levers: tuple[Lever, ...]
    no_levers: str = ""
    modules: tuple[ModuleMemory, ...] = ()

    @property
    def taken_bytes(self) -> int:
        """Bytes that the rank takes of its device, at its peak."""
        return self.memory.device_bytes or self.memory.peak_bytes or 0

    @property
    def limit_explains(self) -> bool:
        """Whether the rank's peak comes near the known limit; else something else refused the memory."""
        return self.limit_bytes is not None and self.taken_bytes >= NEAR * self.limit_bytes

    @property
    def asked_bytes(self) -> int:
        """Bytes that were asked for at once when memory ran out, as torch's message says; 0 where it does not."""
        match = _ASKED.search(self.record.reason)
        # `2.00 GiB` is 2.00 × 1024³; plain bytes have no prefix: 1024⁰.
        return int(float(match[1]) * 1024 ** ("", "K", "M", "G", "T").index(match[2] or "")) if match else 0

    @property
    def exceeds_at_once(self) -> bool:
        """Whether what was asked for at once does not fit beside what the rank holds."""
        return self.limit_bytes is not None and self.taken_bytes + self.asked_bytes > self.limit_bytes

    def fits(self, lever: Lever) -> bool | None:
        """Return whether the run would fit with one lever alone; None where the limit is not known."""
        # Where the peak does not explain the failure, saving some of it proves nothing.
        return lever.taken_bytes <= (self.limit_bytes or 0) if self.limit_explains else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "run_id": self.record.run_id,
            "status": self.record.status,
            "reason": self.record.reason,
            "out_of_memory": self.out_of_memory,
            "source": "measured" if self.measured else "predicted",
            "rank": self.rank,
            "memory": self.memory.to_dict(),
            "limit_bytes": self.limit_bytes,
            "limit_of": self.limit_of,
            "modules": [module.to_dict() for module in self.modules],
            "levers": [
                {
                    "name": lever.name,
                    "change": lever.change,
                    "cost": cost(lever.name),
                    "taken_bytes": lever.taken_bytes,
                    "saved_bytes": lever.saved_bytes,
                    "host_bytes": lever.host_bytes,
                    "fits": self.fits(lever),
                    "runnable": lever.runnable,
                    "command": command(lever),
                }
                for lever in self.levers
            ],
        }


def post_mortem(run: RunFolder) -> PostMortem:
    """Analyse the memory of a run that has ended; its model's own file is not executed.

    Raises:
        LabError: if the run has not ended yet, or can be neither read nor predicted.
    """
    from dlojz.compare import gpu_of, limit_of
    from dlojz.prediction.forecast import heaviest

    record = run.record
    if record is None:
        raise refusal(
            en=f"the run {run.run_id} is {run.state} and has no record yet: wait for its end, or stop it with "
            f"`dlojz cancel {run.run_id}`.",
            fr=f"l’exécution {run.run_id} n’est pas terminée (état : {status_label(run.state)}) : attendez sa fin, "
            f"ou arrêtez-la par `dlojz cancel {run.run_id}`.",
        )
    gpu = gpu_of(record)
    limit = limit_of(record)
    # Without a breakdown at the peak a footprint does not tell what filled the memory.
    measured_footprints = [footprint for footprint in record.footprints if footprint.memory.at_peak_bytes]
    if measured_footprints:
        fullest = max(measured_footprints, key=lambda footprint: footprint.memory.peak_bytes or 0)
        rank, memory = fullest.rank, fullest.memory
    elif record.config.script:
        rank, memory = 0, _of_script(record)
    else:
        with executing_no_file():
            forecast = heaviest(record.config, gpu)
        rank, memory = forecast.rank, forecast.memory
    report = PostMortem(
        record=record,
        out_of_memory=record.status == "oom" or "ran out of memory" in record.reason,
        measured=bool(measured_footprints),
        rank=rank,
        memory=memory,
        limit_bytes=limit[0] if limit else None,
        limit_of=limit[1] if limit else "",
        levers=(),
        modules=record.script_prediction.at_peak if record.script_prediction else (),
    )
    if not report.out_of_memory:
        return report
    try:
        with executing_no_file():
            return replace(report, levers=_cheapest(report, gpu))
    except LabError as error:  # what was measured is told all the same
        # Nothing was measured, and nothing can be predicted: there is nothing to show.
        if not measured_footprints:
            raise
        return replace(report, no_levers=str(error))


def _of_script(record: RunRecord) -> Memory:
    """The memory that a script's first step led to predict.

    Raises:
        LabError: if it led to none.
    """
    prediction = record.script_prediction
    if prediction is not None and prediction.footprint is not None:
        return prediction.footprint.memory
    note = prediction.note if prediction else ""
    raise refusal(
        en=f"the memory of {record.title} was neither measured nor predicted, as it ended too early. {note}".strip(),
        fr=f"la mémoire de {record.title} n’a été ni mesurée ni prédite : il s’est arrêté trop tôt. {note}".strip(),
    )


def _levers_of(record: RunRecord, gpu: Device | None) -> Iterator[Lever]:
    from dlojz.planner.levers import Lever, levers

    if not record.config.script:
        yield from levers(record.config, gpu)
        return
    for lever_prediction in record.script_prediction.levers if record.script_prediction else ():
        if change := _LEVERS.get(lever_prediction.name, {}).get("change"):
            # 0: none of them moves bytes to the host.
            yield Lever(
                lever_prediction.name,
                say(**change),
                record.config,
                lever_prediction.taken_bytes,
                lever_prediction.saved_bytes,
                0,
                runnable=True,
            )


def _cheapest(diagnosis: PostMortem, gpu: Device | None) -> tuple[Lever, ...]:
    """Choose the levers worth their price: those that can be run, then those that suffice alone, then the cheapest."""
    helping = [
        lever
        for lever in _levers_of(diagnosis.record, gpu)
        # Saved + taken: what is taken without the lever.
        if lever.saved_bytes >= WORTH * (lever.saved_bytes + lever.taken_bytes)
        # Without a GPU the memory of the device is the host's: there is nowhere to move to.
        and (gpu is not None or not lever.name.startswith("offload"))
    ]

    def price(lever: Lever) -> tuple[bool, bool, int]:
        has_cost = lever.name in CHEAPEST_FIRST
        cost_rank = CHEAPEST_FIRST.index(lever.name) if has_cost else len(CHEAPEST_FIRST)
        # False sorts before True.
        return not lever.runnable, diagnosis.fits(lever) is False, cost_rank

    return tuple(sorted(helping, key=price)[:LEVERS_SHOWN])
