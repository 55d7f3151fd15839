"""Explain a run out of memory: what filled it, the limit, and the cheapest levers.

The text says which figures were measured and which are predicted; a lever is proposed with its effect on this run and
the command that tries it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dlojz.base.errors import LabError
from dlojz.base.language import format_bytes, refusal, say, significant
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


_AS_DDP = ("as many bytes on the network as DDP", "autant d’octets sur le réseau que DDP")
_NOTHING = ("nothing", "rien")
_COSTS = {
    "zero-grad": _NOTHING,
    "bucket-view": _NOTHING,
    "micro-batch": (
        "the same work in smaller pieces; BatchNorm sees fewer samples at once",
        "le même travail en plus petits morceaux ; BatchNorm voit moins d’exemples à la fois",
    ),
    "zero-1": _AS_DDP,
    "zero-2": _AS_DDP,
    "selective": ("cheap operations are computed twice", "les opérations peu coûteuses sont calculées deux fois"),
    "precision": ("fewer digits; faster on GPUs", "moins de chiffres ; plus rapide sur GPU"),
    "zero-3": ("1.5 times the bytes on the network of DDP", "1,5 fois les octets de DDP sur le réseau"),
    "checkpointing": (
        "about one more forward pass per step: a third more computation",
        "environ une passe avant de plus par pas : un tiers de calcul en plus",
    ),
    "offload-optimizer": ("the update waits for the host and its bus", "la mise à jour attend l’hôte et son bus"),
    "offload-activations": (
        "backward waits for copies from the host",
        "la passe arrière attend des copies depuis l’hôte",
    ),
    "tp": (
        "twice as many devices, communication in every layer",
        "deux fois plus de GPU, des communications dans chaque couche",
    ),
    "pp": ("twice as many devices, idle ones in the bubble", "deux fois plus de GPU, inactifs dans la bulle"),
}
"""Price of each lever in English and French, the cheapest first."""
CHEAPEST_FIRST = tuple(_COSTS)


_IN_SCRIPT = {
    "zero-grad": (
        "gradients set to zero before forward",
        "gradients remis à zéro avant la passe avant",
        "optimizer.zero_grad()  # right after optimizer.step(), not between model(…) and backward",
    ),
    "bucket-view": (
        "gradients as views of DDP's buckets",
        "gradients comme vues des buckets de DDP",
        "DistributedDataParallel(model, gradient_as_bucket_view=True)",
    ),
    "micro-batch": (
        "half the batch, twice as many per step",
        "batch deux fois plus petit, deux fois plus nombreux",
        "(loss / 2).backward()  # for each half of the batch, then optimizer.step()",
    ),
    "precision": ("autocast to bf16", "autocast en bf16", "with torch.autocast(device_type, dtype=torch.bfloat16): …"),
    "checkpointing": (
        "checkpoint every block",
        "points de contrôle à chaque bloc",
        "x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)",
    ),
    "zero-3": (
        "FSDP2, weights gathered for each pass",
        "FSDP2, poids rassemblés pour chaque passe",
        "fully_shard(block, reshard_after_forward=True)  # each block, then the model",
    ),
}
"""Levers of a script: in English, in French, and the line of code that pulls each."""


def cost(name: str) -> str:
    """Return the price of a lever, in words; empty for one that is not known."""
    en, fr = _COSTS.get(name, ("", ""))
    return say(en=en, fr=fr)


def command(lever: Lever) -> str:
    """Write the command that tries a lever: a run, a prediction where no engine runs it yet, a line of a script."""
    if lever.config.script:
        return _IN_SCRIPT[lever.name][2]
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
        lines += [
            "",
            say(
                en=f"It then asked for {request} at once, more than the limit leaves: what failed was larger than the "
                f"step that was {source}, by its batch or by one more tensor.",
                fr=f"Il a ensuite demandé {request} d’un coup, plus que la limite n’en laisse : ce qui a échoué était "
                f"plus grand que le pas {source}, par son batch ou par un tenseur de plus.",
            ),
        ]
    elif report.limit_bytes and not report.limit_explains:
        lines += [
            "",
            say(
                en="That is well below the limit: Python and the libraries of each process (some hundred MiB) filled "
                "it, or something else refused the memory (`ulimit -v`, the limit of a job, other programs of this "
                "machine).",
                fr="C’est bien en dessous de la limite : Python et les bibliothèques de chaque processus (quelques "
                "centaines de Mio) l’ont remplie, ou la mémoire a été refusée pour une autre raison (`ulimit -v`, la "
                "limite d’un job, d’autres programmes de cette machine).",
            ),
        ]
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
        limit = say(
            en=f"; the limit is {format_bytes(report.limit_bytes)}, {report.limit_of}: {share} % of it are taken",
            fr=f" ; la limite est de {format_bytes(report.limit_bytes)}, {report.limit_of} : {share} % en sont pris",
        )
    return say(
        en=f"Rank {report.rank} holds {format_bytes(memory.peak_bytes)} at its peak, in the {phase} ({source}): "
        f"states {format_bytes(memory.states_bytes)}, activations {format_bytes(memory.activations_bytes)}{limit}.",
        fr=f"Le rang {report.rank} détient {format_bytes(memory.peak_bytes)} au pic, en {phase} ({source}) : "
        f"états {format_bytes(memory.states_bytes)}, activations {format_bytes(memory.activations_bytes)}{limit}.",
    )


def _lever_lines(report: PostMortem) -> Iterator[str]:
    if report.no_levers:
        yield report.no_levers[0].upper() + report.no_levers[1:]
        return
    predicted = report.record.script_prediction
    if not report.levers and predicted and predicted.levers:
        yield say(
            en="No lever predicted for the script's first step saves enough to be worth it; of a larger batch, half of "
            "it, checkpointing and bf16 are the usual ones.",
            fr="Aucun levier prédit pour le premier pas du script n’économise assez ; d’un batch plus grand, la moitié "
            "du batch, les points de contrôle et bf16 sont les plus courants.",
        )
        return
    if not report.levers and report.record.config.script:
        yield say(
            en="No lever was predicted before the script ended: half the batch, checkpointing and bf16 are the usual "
            "ones.",
            fr="Aucun levier n’a été prédit avant la fin du script : moitié du batch, points de contrôle et bf16 sont "
            "les plus courants.",
        )
        return
    if not report.levers:
        yield say(
            en="No single lever saves enough to be worth it: take a smaller model, or more devices.",
            fr="Aucun levier n’économise assez à lui seul : prenez un modèle plus petit, ou plus de GPU.",
        )
        return
    yield say(
        en="The cheapest levers (predicted effect on the fullest rank):",
        fr="Les leviers les moins coûteux (effet prédit sur le rang le plus chargé) :",
    )
    enough, short = say(en=", fits", fr=", tient"), say(en=", not enough alone", fr=", ne suffit pas seul")
    for number, lever in enumerate(report.levers, 1):
        fits = {True: enough, False: short, None: ""}[report.fits(lever)]
        mark = "" if lever.runnable else say(en=" [predicted only]", fr=" [prédit seulement]")
        yield say(
            en=f"  {number}. {lever.change}: saves {format_bytes(lever.saved_bytes)}, takes "
            f"{format_bytes(lever.taken_bytes)}{fits}{mark}",
            fr=f"  {number}. {lever.change} : économise {format_bytes(lever.saved_bytes)}, prend "
            f"{format_bytes(lever.taken_bytes)}{fits}{mark}",
        )
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
        if lever_prediction.name in _IN_SCRIPT:
            english, french, _ = _IN_SCRIPT[lever_prediction.name]
            change = say(en=english, fr=french)
            # 0: none of them moves bytes to the host.
            yield Lever(
                lever_prediction.name,
                change,
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
