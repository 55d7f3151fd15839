"""What is said of a run that ran out of memory, and what each lever costs.

Layer 6. Invariant: every figure is read from the diagnosis; which were measured and which predicted is said.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.text import Text

from dlojz.cli.flags import command_of
from dlojz.text import say
from dlojz.units import format_bytes
from dlojz.viz.grid import status_label
from dlojz.viz.markup import visible
from dlojz.viz.palette import category_label, phase_label

if TYPE_CHECKING:
    from dlojz.cli.post_mortem import Diagnosis
    from dlojz.predict.advice import Lever
    from dlojz.record import RunRecord


def cost(name: str) -> str:
    """What a lever costs, in words; empty for one that is not known."""
    return {
        "micro-batch": say(
            en="the same work in smaller pieces; BatchNorm sees fewer samples at once",
            fr="le même travail en plus petits morceaux ; BatchNorm voit moins d’exemples à la fois",
        ),
        "zero-1": say(en="as many bytes on the network as DDP", fr="autant d’octets sur le réseau que DDP"),
        "zero-2": say(en="as many bytes on the network as DDP", fr="autant d’octets sur le réseau que DDP"),
        "zero-3": say(en="1.5 times the bytes on the network of DDP", fr="1,5 fois les octets de DDP sur le réseau"),
        "selective": say(
            en="cheap operations are computed twice", fr="les opérations peu coûteuses sont calculées deux fois"
        ),
        "checkpointing": say(
            en="about one more forward pass per step: a third more computation",
            fr="environ une passe avant de plus par pas : un tiers de calcul en plus",
        ),
        "precision": say(en="fewer digits; faster on GPUs", fr="moins de chiffres ; plus rapide sur GPU"),
        "offload-optimizer": say(
            en="the update waits for the host and its bus", fr="la mise à jour attend l’hôte et son bus"
        ),
        "offload-activations": say(
            en="backward waits for copies from the host", fr="la passe arrière attend des copies depuis l’hôte"
        ),
        "tp": say(
            en="twice as many devices, communication in every layer",
            fr="deux fois plus de GPU, des communications dans chaque couche",
        ),
        "pp": say(
            en="twice as many devices, idle ones in the bubble", fr="deux fois plus de GPU, inactifs dans la bulle"
        ),
    }.get(name, "")


def command(lever: Lever) -> str:
    """What to type: the run, or its prediction where no engine runs it yet."""
    return command_of(lever.config, "run" if lever.runnable else "memory")


def told(diagnosis: Diagnosis) -> list[Any]:
    """The diagnosis as texts to print, one after the other."""
    record = diagnosis.record
    if not diagnosis.out_of_memory:
        return [_ended_otherwise(record), _in_one_line(diagnosis)]
    memory = diagnosis.memory
    lines: list[Any] = [
        Text(
            say(
                en=f"{record.run_id} ({visible(record.config.title)}) ran out of memory: {visible(record.reason)}",
                fr=f"{record.run_id} ({visible(record.config.title)}) a épuisé la mémoire : {visible(record.reason)}",
            ),
            style="bold",
        ),
        "",
        _in_one_line(diagnosis),
    ]
    lines += [
        f"  {category_label(name):<12} {format_bytes(num_bytes):>10}"
        for name, num_bytes in sorted((memory.at_peak_bytes or {}).items(), key=lambda item: -item[1])
        if num_bytes
    ]
    if diagnosis.limit_bytes and not diagnosis.limit_explains:
        lines += [
            "",
            say(
                en="That is well below the limit: something else refused the memory (`ulimit -v`, the limit of a job, "
                "other programs of this machine).",
                fr="C’est bien en dessous de la limite : la mémoire a été refusée pour une autre raison (`ulimit -v`, "
                "la limite d’un job, d’autres programmes de cette machine).",
            ),
        ]
    lines += ["", *_lever_lines(diagnosis)]
    return lines


def _ended_otherwise(record: RunRecord) -> str:
    why = f" ({visible(record.reason)})" if record.reason else ""
    return say(
        en=f"{record.run_id} ({visible(record.config.title)}) did not run out of memory: "
        f"{status_label(record.status)}{why}.",
        fr=f"{record.run_id} ({visible(record.config.title)}) n’a pas manqué de mémoire : "
        f"{status_label(record.status)}{why}.",
    )


def _in_one_line(diagnosis: Diagnosis) -> str:
    memory, phase = diagnosis.memory, phase_label(visible(diagnosis.memory.peak_moment or ""))
    source = (
        say(en="measured in an earlier step", fr="mesuré à un pas précédent")
        if diagnosis.measured and diagnosis.out_of_memory
        else say(en="measured", fr="mesuré")
        if diagnosis.measured
        else say(en="predicted, as nothing was measured", fr="prédit, car rien n’a été mesuré")
    )
    limit = ""
    if diagnosis.limit_bytes:
        share = f"{100 * diagnosis.taken_bytes / diagnosis.limit_bytes:.2g}"
        limit = say(
            en=f"; the limit is {format_bytes(diagnosis.limit_bytes)}, {diagnosis.limit_of}: {share} % of it are taken",
            fr=f" ; la limite est de {format_bytes(diagnosis.limit_bytes)}, {diagnosis.limit_of} : "
            f"{share.replace('.', ',')} % en sont pris",
        )
    return say(
        en=f"Rank {diagnosis.rank} holds {format_bytes(memory.peak_bytes)} at its peak, in the {phase} ({source}): "
        f"states {format_bytes(memory.states_bytes)}, activations {format_bytes(memory.activations_bytes)}{limit}.",
        fr=f"Le rang {diagnosis.rank} détient {format_bytes(memory.peak_bytes)} au pic, en {phase} ({source}) : "
        f"états {format_bytes(memory.states_bytes)}, activations {format_bytes(memory.activations_bytes)}{limit}.",
    )


def _lever_lines(diagnosis: Diagnosis) -> list[str]:
    if not diagnosis.levers:
        return [
            say(
                en="No single lever saves enough to be worth it: take a smaller model, or more devices.",
                fr="Aucun levier n’économise assez à lui seul : prenez un modèle plus petit, ou plus de GPU.",
            )
        ]
    lines = [
        say(
            en="The cheapest levers (predicted effect on the fullest rank):",
            fr="Les leviers les moins coûteux (effet prédit sur le rang le plus chargé) :",
        )
    ]
    for number, lever in enumerate(diagnosis.levers, 1):
        fits = {
            True: say(en=", fits", fr=", tient"),
            False: say(en=", not enough alone", fr=", ne suffit pas seul"),
            None: "",
        }[diagnosis.fits(lever)]
        predicted = "" if lever.runnable else say(en=" [predicted only]", fr=" [prédit seulement]")
        lines += [
            say(
                en=f"  {number}. {lever.change}: saves {format_bytes(lever.saved_bytes)}, takes "
                f"{format_bytes(lever.taken_bytes)}{fits}{predicted}",
                fr=f"  {number}. {lever.change} : économise {format_bytes(lever.saved_bytes)}, prend "
                f"{format_bytes(lever.taken_bytes)}{fits}{predicted}",
            ),
            "     " + say(en="costs: ", fr="coût : ") + cost(lever.name),
            f"     {command(lever)}",
        ]
    return lines
