"""What filled the memory of a run and what to do about it, in words: for a terminal and for a diagnosis.

Layer 5. Invariant: every figure is read from the findings; which were measured and which predicted is said.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlojz.runs.command_line import command_of
from dlojz.text import say
from dlojz.units import format_bytes
from dlojz.viz.markup import visible
from dlojz.viz.palette import category_label, phase_label

if TYPE_CHECKING:
    from dlojz.predict.advice import Lever
    from dlojz.runs.post_mortem import PostMortem


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


def memory_lines(found: PostMortem) -> list[str]:
    """What was held by category, the limit, and the cheapest levers with their effect, line by line."""
    memory = found.memory
    lines = [in_one_line(found)]
    lines += [
        f"  {category_label(name):<12} {format_bytes(num_bytes):>10}"
        for name, num_bytes in sorted((memory.at_peak_bytes or {}).items(), key=lambda item: -item[1])
        if num_bytes
    ]
    if found.limit_bytes and not found.limit_explains:
        lines += [
            "",
            say(
                en="That is well below the limit: something else refused the memory (`ulimit -v`, the limit of a job, "
                "other programs of this machine).",
                fr="C’est bien en dessous de la limite : la mémoire a été refusée pour une autre raison (`ulimit -v`, "
                "la limite d’un job, d’autres programmes de cette machine).",
            ),
        ]
    return [*lines, "", *_lever_lines(found)]


def in_one_line(found: PostMortem) -> str:
    """What the fullest rank holds at its peak, and how much of the limit that is."""
    memory, phase = found.memory, phase_label(visible(found.memory.peak_moment or ""))
    source = (
        say(en="measured in an earlier step", fr="mesuré à un pas précédent")
        if found.measured and found.out_of_memory
        else say(en="measured", fr="mesuré")
        if found.measured
        else say(en="predicted, as nothing was measured", fr="prédit, car rien n’a été mesuré")
    )
    limit = ""
    if found.limit_bytes:
        share = f"{100 * found.taken_bytes / found.limit_bytes:.2g}"
        limit = say(
            en=f"; the limit is {format_bytes(found.limit_bytes)}, {found.limit_of}: {share} % of it are taken",
            fr=f" ; la limite est de {format_bytes(found.limit_bytes)}, {found.limit_of} : "
            f"{share.replace('.', ',')} % en sont pris",
        )
    return say(
        en=f"Rank {found.rank} holds {format_bytes(memory.peak_bytes)} at its peak, in the {phase} ({source}): "
        f"states {format_bytes(memory.states_bytes)}, activations {format_bytes(memory.activations_bytes)}{limit}.",
        fr=f"Le rang {found.rank} détient {format_bytes(memory.peak_bytes)} au pic, en {phase} ({source}) : "
        f"états {format_bytes(memory.states_bytes)}, activations {format_bytes(memory.activations_bytes)}{limit}.",
    )


def _lever_lines(found: PostMortem) -> list[str]:
    if not found.levers:
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
    for number, lever in enumerate(found.levers, 1):
        fits = {
            True: say(en=", fits", fr=", tient"),
            False: say(en=", not enough alone", fr=", ne suffit pas seul"),
            None: "",
        }[found.fits(lever)]
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
