"""Tables and sentences of one rank's trace, of two traces of one program, and of memory snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import median

from dlojz.base.language import decimal, format_bytes, integer, minus, percent, say, spaced_percent
from dlojz.base.table import Table, titles, visible
from dlojz.display.collective_text import format_latency
from dlojz.display.tables import DASH
from dlojz.results.memory_snapshot import AUTOGRAD, BEFORE, NO_FRAME, FrameBytes, FrameGrowth, MemorySnapshot
from dlojz.results.rank_profile import (
    LAUNCH_BOUND,
    MOST_SECONDS_APART,
    Change,
    DeviceIdling,
    ProfileComparison,
    RankProfile,
)

MOST_KERNELS, MOST_FRAMES, MOST_LETTERS = 8, 10, 46
LEAST_CHANGE = 0.02
"""Part of the time, or of the peak, below which a difference is said to be none worth a sentence."""
LEAST_OTHER = 0.05
_NAMESPACES = ("void ", "at::native::", "(anonymous namespace)::", "c10::", "std::")


def kernel_kind(kind: str) -> str:
    """Translate a kind of kernel."""
    return {
        "product": say(en="products", fr="produits"),
        "attention": say(en="attention", fr="attention"),
        "elementwise": say(en="elementwise", fr="élément par élément"),
        "normalisation": say(en="normalisation, softmax", fr="normalisation, softmax"),
        "reduction": say(en="reductions", fr="réductions"),
        "communication": say(en="communication", fr="communication"),
        "copy": say(en="copies, casts", fr="copies, conversions"),
        "other": say(en="other", fr="autres"),
        "computing": say(en="computing", fr="calcul"),
        "exposed": say(en="communication exposed", fr="communication exposée"),
        "hidden": say(en="communication hidden", fr="communication recouverte"),
        "idle": say(en="idle", fr="inactivité"),
    }.get(kind, kind)


def kernel_label(name: str) -> str:
    """Shorten the name of a kernel: without namespaces and arguments, at most 46 letters."""
    for namespace in _NAMESPACES:
        name = name.replace(namespace, "")
    short = visible(name)
    return short if len(short) <= MOST_LETTERS else short[: MOST_LETTERS - 1] + "…"


def _share(seconds: float, length_s: float) -> str:
    return f"{format_latency(seconds)} ({percent(seconds / length_s if length_s else 0.0, 0)})"


def profile_sentence(profile: RankProfile) -> str:
    """Name the rank, its device, what is counted, and the steps."""
    rank = (
        say(en="A rank that the trace does not name", fr="Un rang que la trace ne nomme pas")
        if profile.rank is None
        else say(en=f"Rank {profile.rank}", fr=f"Rang {profile.rank}")
    )
    if profile.world_size:
        rank += say(en=f" of {profile.world_size}", fr=f" sur {profile.world_size}")
    device = ", ".join(profile.devices) if profile.log.on_device else "CPU"
    on = f" ({device})" if device else ""
    if not profile.step_mark:
        return say(
            en=f"{rank}{on}: {format_latency(profile.length_s)} traced; no step is marked, so figures are of the "
            "whole.",
            fr=f"{rank}{on} : {format_latency(profile.length_s)} tracées ; aucun pas n’est marqué, les chiffres sont "
            "ceux du tout.",
        )
    shortest, longest = min(profile.steps_s), max(profile.steps_s)
    middle = median(profile.steps_s)
    return say(
        en=f"{rank}{on}: {profile.steps} steps ({profile.step_mark}) in {format_latency(profile.length_s)}; on the "
        f"host a step takes {format_latency(middle)} (median; {format_latency(shortest)} to "
        f"{format_latency(longest)}).",
        fr=f"{rank}{on} : {profile.steps} pas ({profile.step_mark}) en {format_latency(profile.length_s)} ; côté hôte, "
        f"un pas dure {format_latency(middle)} (médiane ; de {format_latency(shortest)} à {format_latency(longest)}).",
    )


def parts_table(profile: RankProfile) -> Table:
    """Divide the time into computing, exposed communication and idle; hidden communication beside."""
    head = titles(en="; time; per step", fr="; temps; par pas")
    rows = tuple(
        (kernel_kind(part), _share(seconds, profile.length_s), format_latency(seconds / profile.steps))
        for part, seconds in profile.parts_s.items()
    )
    caption = say(
        en=f"What it does in {format_latency(profile.length_s)} (hidden communication runs beside computing)",
        fr=f"Ce qu’il fait en {format_latency(profile.length_s)} (la communication recouverte a lieu pendant le "
        "calcul)",
    )
    return _per_step(Table(head, rows, caption, align="lr", whole=1), profile)


def kinds_table(profile: RankProfile) -> Table:
    """List the kinds of kernels, most seconds first."""
    busy_s = sum(row.seconds for row in profile.kinds)
    head = titles(en="kind; number; time; per step", fr="sorte; nombre; temps; par pas")
    rows = tuple(
        (
            kernel_kind(row.kind),
            integer(row.calls),
            _share(row.seconds, busy_s),
            format_latency(row.seconds / profile.steps),
        )
        for row in profile.kinds
    )
    on_device, on_host = (
        say(
            en="Kernels by kind (those of several streams run side by side)",
            fr="Noyaux par sorte (ceux de plusieurs flux s’exécutent de front)",
        ),
        say(
            en="Operators by kind, each without those that it calls",
            fr="Opérateurs par sorte, chacun sans ceux qu’il appelle",
        ),
    )
    caption = on_device if profile.log.on_device else on_host
    return _per_step(Table(head, rows, caption, align="lr", whole=1), profile)


def kernels_table(profile: RankProfile) -> Table:
    """List the kernels (or operators) that take most seconds."""
    head = titles(en="name; number; time; mean; longest", fr="nom; nombre; temps; moyenne; le plus long")
    rows = tuple(
        (
            kernel_label(row.name),
            integer(row.calls),
            format_latency(row.seconds),
            format_latency(row.seconds / row.calls),
            format_latency(row.longest_s),
        )
        for row in profile.kernels[:MOST_KERNELS]
    )
    names, on_device = f"{len(rows)} / {integer(len(profile.kernels))}", profile.log.on_device
    caption = say(
        en=f"{'Kernels' if on_device else 'Operators'} that take most time in sum ({names})",
        fr=f"{'Noyaux' if on_device else 'Opérateurs'} les plus coûteux au total ({names})",
    )
    return Table(head, rows, caption, align="lr", whole=1)


def _per_step(table: Table, profile: RankProfile) -> Table:
    """Leave out the last column where no step is marked."""
    if profile.step_mark:
        return table
    return Table(table.head[:-1], tuple(row[:-1] for row in table.rows), table.caption, table.align, table.whole)


def launching_sentences(profile: RankProfile) -> Iterator[str]:
    """Say whether the rank is launch-bound, why, and what the device waits for when it idles."""
    facts = profile.launching
    if facts is None:
        yield say(
            en="Launch-bound: does not apply, as no kernel of a device is in the trace"
            + (
                f", though {integer(profile.launches)} calls launch some: the profiler recorded none of them."
                if profile.launches
                else "; where the training used a GPU, profile with ProfilerActivity.CUDA too."
            ),
            fr="Limité par les lancements : sans objet, car aucun noyau d’accélérateur n’est dans la trace"
            + (
                f", bien que {integer(profile.launches)} appels en lancent : le profileur n’en a enregistré aucun."
                if profile.launches
                else " ; si l’entraînement utilisait un GPU, profilez aussi avec ProfilerActivity.CUDA."
            ),
        )
        return
    if facts.bound is None:
        yield say(
            en=f"Launch-bound: unknown, as the calls that launch {integer(facts.kernels - facts.known)} of "
            f"{integer(facts.kernels)} kernels are not in the trace; profile with ProfilerActivity.CPU too.",
            fr="Limité par les lancements : inconnu, car les appels qui lancent "
            f"{integer(facts.kernels - facts.known)} noyaux sur {integer(facts.kernels)} manquent dans la trace ; "
            "profilez aussi avec ProfilerActivity.CPU.",
        )
        return
    share = percent(facts.running_s / facts.length_s if facts.length_s else 0.0)
    figures_en = (
        f"the CPU launches a kernel every {format_latency(facts.spacing_s)}, a kernel lasts "
        f"{format_latency(facts.kernel_s)}, and starts {format_latency(facts.delay_s)} after its launch (medians)"
    )
    figures_fr = (
        f"le CPU lance un noyau toutes les {format_latency(facts.spacing_s)}, un noyau dure "
        f"{format_latency(facts.kernel_s)} et démarre {format_latency(facts.delay_s)} après son lancement (médianes)"
    )
    limit = percent(LAUNCH_BOUND, 0)
    yield (
        say(
            en=f"Launch-bound: yes, the device waits for the CPU. {share} of the time the device idles while the CPU "
            f"runs operators and Python and nothing is queued (threshold: {limit}); {figures_en}. Fewer and "
            "larger kernels help: a larger micro-batch, torch.compile, CUDA graphs, fused optimizers.",
            fr=f"Limité par les lancements : oui, l’accélérateur attend le CPU. {share} du temps, "
            "l’accélérateur est inactif pendant que le CPU exécute opérateurs et Python, la file étant vide "
            f"(seuil : {limit}) ; {figures_fr}. Des noyaux moins nombreux et plus gros "
            "aident : micro-batch plus grand, torch.compile, graphes CUDA, optimiseurs fusionnés.",
        )
        if facts.bound
        else say(
            en=f"Launch-bound: no. {share} of the time the device idles because the CPU has launched nothing yet "
            f"(threshold: {limit}); {figures_en}.",
            fr=f"Limité par les lancements : non. {share} du temps, l’accélérateur est inactif parce que le CPU "
            f"n’a encore rien lancé (seuil : {limit}) ; {figures_fr}.",
        )
    )
    yield from _idle_sentence(facts)


def _idle_sentence(facts: DeviceIdling) -> Iterator[str]:
    reasons = {
        say(en="the CPU runs operators and Python", fr="le CPU exécute opérateurs et Python"): facts.running_s,
        say(en="the CPU loads data", fr="le CPU charge les données"): facts.loading_s,
        say(
            en=f"a synchronisation has emptied the queue ({integer(facts.synchronisations)} calls such as .item())",
            fr=f"une synchronisation a vidé la file ({integer(facts.synchronisations)} appels, tels que .item())",
        ): facts.synchronised_s,
        say(
            en="the next kernel is launched, but waits for another stream, or has yet to start",
            fr="le noyau suivant est lancé, mais attend un autre flux, ou n’a pas encore démarré",
        ): facts.queued_s,
        say(
            en="unknown, its launch is not in the trace", fr="inconnu, son lancement manque dans la trace"
        ): facts.unknown_s,
    }
    longest = sorted(((seconds, reason) for reason, seconds in reasons.items() if seconds > 0), reverse=True)
    if longest:
        listed = "; ".join(f"{format_latency(seconds)}: {reason}" for seconds, reason in longest)
        french = " ; ".join(f"{format_latency(seconds)} : {reason}" for seconds, reason in longest)
        yield say(en=f"Why the device idles: {listed}.", fr=f"Pourquoi l’accélérateur est inactif : {french}.")


def unknown_sentences(profile: RankProfile) -> Iterator[str]:
    """Say what the trace of one rank alone does not show."""
    if not profile.communication and profile.world_size in (None, 1):
        yield say(
            en="No communication is in the trace: nothing shows that this rank waits for another.",
            fr="Aucune communication n’est dans la trace : rien ne montre que ce rang en attend un autre.",
        )
    else:
        yield say(
            en="Unknown from one rank: who comes late to a collective and who waits for whom; part of the exposed "
            "communication may be such a wait. The traces of all ranks, or their folder, show it.",
            fr="Inconnu d’après un seul rang : qui arrive en retard à une collective et qui attend qui ; une partie de "
            "la communication exposée peut être une telle attente. Les traces de tous les rangs, ou leur dossier, le "
            "montrent.",
        )
    busy_s = sum(row.seconds for row in profile.kinds)
    other_s = sum(row.seconds for row in profile.kinds if row.kind == "other")
    if profile.log.on_device and other_s > LEAST_OTHER * busy_s:
        yield say(
            en=f"The kind of {percent(other_s / busy_s, 0)} of the kernels' time is not recognised by their names.",
            fr=f"La sorte de {spaced_percent(other_s / busy_s, 0)} du temps des noyaux n’est pas reconnue à leurs "
            "noms.",
        )
    if profile.outside:
        yield say(
            en=f"Not counted: {integer(profile.outside)} kernels or operators outside of the steps.",
            fr=f"Non comptés : {integer(profile.outside)} noyaux ou opérateurs en dehors des pas.",
        )
    if profile.repeated:
        yield say(
            en=f"{integer(profile.repeated)} events of the device stand twice in the file, and were counted once.",
            fr=f"{integer(profile.repeated)} événements de l’accélérateur figurent deux fois dans le fichier, et sont "
            "comptés une fois.",
        )
    if profile.device_count > 1:
        yield say(
            en=f"Kernels of {profile.device_count} devices are in this one trace: busy is where any of them is.",
            fr=f"Les noyaux de {profile.device_count} accélérateurs sont dans cette trace : occupé signifie que l’un "
            "d’eux l’est.",
        )


# ---- two traces


def _signed(seconds: float) -> str:
    # What rounding leaves of equal times is none.
    return "=" if abs(seconds) < MOST_SECONDS_APART else f"{'+' if seconds > 0 else '−'}{format_latency(abs(seconds))}"


def comparison_sentence(comparison: ProfileComparison) -> str:
    """Say how much longer the second takes, and what that is a figure of."""
    before, after, length = comparison.before, comparison.after, comparison.length
    names = f"{before.name}", f"{after.name}"
    share = length.difference_s / length.before_s if length.before_s else 0.0
    gap = minus(percent(share, signed=True))
    if comparison.per_step:
        return say(
            en=f"A step takes {format_latency(length.after_s)} in {names[1]} ({after.steps} steps), "
            f"{format_latency(length.before_s)} in {names[0]} ({before.steps} steps): {_signed(length.difference_s)} "
            f"({gap}). All figures are per step.",
            fr=f"Un pas dure {format_latency(length.after_s)} dans {names[1]} ({after.steps} pas), "
            f"{format_latency(length.before_s)} dans {names[0]} ({before.steps} pas) : {_signed(length.difference_s)} "
            f"({gap}). Tous les chiffres sont par pas.",
        )
    return say(
        en=f"{names[1]} takes {format_latency(length.after_s)}, {names[0]} {format_latency(length.before_s)}: "
        f"{_signed(length.difference_s)} ({gap}). No step is marked, so whole traces are compared: that says something "
        "only if both do the same work, which the numbers of calls show.",
        fr=f"{names[1]} dure {format_latency(length.after_s)}, {names[0]} {format_latency(length.before_s)} : "
        f"{_signed(length.difference_s)} ({gap}). Aucun pas n’est marqué : les traces entières sont comparées, "
        "ce qui n’a de sens que si les deux font le même travail, ce que montrent les nombres d’appels.",
    )


def changes_table(comparison: ProfileComparison, which: str) -> Table:
    """List what changed, largest difference first.

    Args:
        which: `parts` of the time, `kinds` of kernels, or `kernels` by name.
    """
    rows: tuple[Change, ...] = getattr(comparison, which)
    label: Callable[[str], str] = kernel_label if which == "kernels" else kernel_kind
    count = which != "parts"
    head = titles(en="; before; after; difference; calls", fr="; avant; après; différence; appels")
    cells: tuple[tuple[str, ...], ...] = tuple(
        (
            label(row.name),
            format_latency(row.before_s) if row.before_calls or not count else DASH,
            format_latency(row.after_s) if row.after_calls or not count else DASH,
            _signed(row.difference_s),
            _calls(row),
        )
        for row in rows[:MOST_KERNELS]
    )
    caption = {
        "parts": say(en="Parts of the time", fr="Parts du temps"),
        "kinds": say(en="By kind", fr="Par sorte"),
        "kernels": say(
            en=f"The {len(cells)} largest differences of {integer(len(rows))} names",
            fr=f"Les {len(cells)} plus grandes différences, sur {integer(len(rows))} noms",
        ),
    }[which]
    columns = len(head) - (which == "parts")
    return Table(head[:columns], tuple(row[:columns] for row in cells), caption, align="lr", whole=1)


def _calls(row: Change) -> str:
    before, after = (
        decimal(calls, 0 if float(calls).is_integer() else 1) for calls in (row.before_calls, row.after_calls)
    )
    return before if before == after else f"{before} → {after}"


def change_sentences(comparison: ProfileComparison) -> Iterator[str]:
    """Say what the largest difference is, of the parts of the time and of the kernels."""
    length_s = max(comparison.length.before_s, comparison.length.after_s)
    part = max((row for row in comparison.parts if row.name != "hidden"), key=lambda row: abs(row.difference_s))
    if abs(part.difference_s) > LEAST_CHANGE * length_s:
        times = f"{format_latency(part.before_s)} → {format_latency(part.after_s)} ({_signed(part.difference_s)})"
        yield say(
            en=f"The part that changes most: {kernel_kind(part.name)}, {times}.",
            fr=f"La part qui change le plus : {kernel_kind(part.name)}, {times}.",
        )
    largest = comparison.kernels[0] if comparison.kernels else None
    if largest is None or abs(largest.difference_s) <= LEAST_CHANGE * length_s:
        yield say(
            en=f"No kernel changes by more than {percent(LEAST_CHANGE, 0)} of the time.",
            fr=f"Aucun noyau ne change de plus de {spaced_percent(LEAST_CHANGE, 0)} du temps.",
        )
        return
    name, change = kernel_label(largest.name), _signed(largest.difference_s)
    if largest.by_calls_s is None:
        gone = not largest.after_calls
        calls = decimal(largest.before_calls if gone else largest.after_calls, 1)
        yield say(
            en=f"The kernel that changes most is {name} ({change}): it {'is gone' if gone else 'is new'} "
            f"(calls: {calls}).",
            fr=f"Le noyau qui change le plus est {name} ({change}) : il "
            f"{'a disparu' if gone else 'est nouveau'} (appels : {calls}).",
        )
        return
    means = [
        format_latency(largest.before_s / largest.before_calls),
        format_latency(largest.after_s / largest.after_calls),
    ]
    mostly_calls = abs(largest.by_calls_s) > abs(largest.difference_s) / 2
    yield say(
        en=f"The kernel that changes most is {name} ({change}): "
        + ("mainly the number of calls" if mostly_calls else "mainly the time of each call")
        + f" (calls: {_calls(largest)}; each {means[0]} → {means[1]}).",
        fr=f"Le noyau qui change le plus est {name} ({change}) : "
        + ("surtout le nombre d’appels" if mostly_calls else "surtout la durée de chaque appel")
        + f" (appels : {_calls(largest)} ; chacun {means[0]} → {means[1]}).",
    )


def different_devices_sentence(comparison: ProfileComparison) -> str:
    """Say that the two ran on different GPUs, or steps are marked differently; empty where neither is so."""
    before, after = comparison.before, comparison.after
    if before.devices and after.devices and before.devices != after.devices:
        first, second = ", ".join(before.devices), ", ".join(after.devices)
        return say(
            en=f"They ran on different devices ({first}; {second}): names of kernels differ by that alone.",
            fr=f"Elles viennent d’accélérateurs différents ({first} ; {second}) : les noms des noyaux en diffèrent "
            "déjà.",
        )
    if before.step_mark != after.step_mark:
        return say(
            en=f"Steps are marked by {before.step_mark} in the first and by {after.step_mark} in the second.",
            fr=f"Les pas sont marqués par {before.step_mark} dans la première et par {after.step_mark} dans la "
            "seconde.",
        )
    return ""


# ---- memory snapshots


def frame_label(frame: str) -> str:
    """Name a line of a program, or say why none is known."""
    known: Mapping[str, str] = {
        NO_FRAME: say(en="(no Python frame recorded)", fr="(aucun appel Python enregistré)"),
        AUTOGRAD: say(en="(backward: autograd in C++)", fr="(passe arrière : autograd en C++)"),
        BEFORE: say(en="(before the record began)", fr="(avant le début de l’enregistrement)"),
    }
    if frame in known:
        return known[frame]
    return frame if len(frame) <= MOST_LETTERS else "…" + frame[1 - MOST_LETTERS :]


def snapshot_sentences(snapshot: MemorySnapshot) -> Iterator[str]:
    """Say what the peak was and when, or that only the end is known; and where memory ran out."""
    device = f"{snapshot.name}, GPU {snapshot.device}"
    if snapshot.recorded:
        reserved = int(snapshot.reserved_bytes[snapshot.peak])
        entries = integer(len(snapshot.in_use_bytes) - 1)
        yield say(
            en=f"{device}: peak of {format_bytes(snapshot.peak_bytes)} in use after {integer(snapshot.peak)} of "
            f"{entries} entries of the record, with {format_bytes(reserved)} reserved; at its start "
            f"{format_bytes(int(snapshot.in_use_bytes[0]))}, at its end "
            f"{format_bytes(int(snapshot.in_use_bytes[-1]))}.",
            fr=f"{device} : pic de {format_bytes(snapshot.peak_bytes)} utilisés après {integer(snapshot.peak)} entrées "
            f"de l’enregistrement sur {entries}, avec {format_bytes(reserved)} réservés ; au début "
            f"{format_bytes(int(snapshot.in_use_bytes[0]))}, à la fin {format_bytes(int(snapshot.in_use_bytes[-1]))}.",
        )
    else:
        yield say(
            en=f"{device}: {format_bytes(snapshot.peak_bytes)} in use when it was taken. It has no record of "
            "allocations, so the peak is unknown: call torch.cuda.memory._record_memory_history() before the steps.",
            fr=f"{device} : {format_bytes(snapshot.peak_bytes)} utilisés au moment de la prise. Il n’a pas "
            "d’enregistrement des allocations, le pic est donc inconnu : appelez "
            "torch.cuda.memory._record_memory_history() avant les pas.",
        )
    for asked, free in snapshot.out_of_memory[:1]:
        left = format_bytes(free)
        yield say(
            en=f"Memory ran out: {format_bytes(asked)} asked for, {left} free on the GPU (failures in the record: "
            f"{len(snapshot.out_of_memory)}; this is the first).",
            fr=f"La mémoire a manqué : {format_bytes(asked)} demandés, {left} libres sur le GPU (échecs dans "
            f"l’enregistrement : {len(snapshot.out_of_memory)} ; c’est le premier).",
        )
    if snapshot.other_devices:
        numbers = ", ".join(map(str, snapshot.other_devices))
        yield say(
            en=f"The file has other devices, which hold less: {numbers}.",
            fr=f"Le fichier a d’autres accélérateurs, moins chargés : {numbers}.",
        )


def frames_table(snapshot: MemorySnapshot) -> Table:
    """List what is in use at the peak by line of the program, largest first."""
    rows = snapshot.at_peak
    whole = sum(row.size_bytes for row in rows)
    head = titles(en="allocated at; bytes; share; blocks", fr="alloué par; octets; part; blocs")
    cells = [_frame_row(row, whole) for row in rows[:MOST_FRAMES]]
    if further := rows[MOST_FRAMES:]:
        label = say(en=f"{integer(len(further))} others", fr=f"{integer(len(further))} autres")
        sums = sum(row.size_bytes for row in further), sum(row.blocks for row in further)
        cells.append((label, *_frame_row(FrameBytes("", *sums), whole)[1:]))
    caption = (
        say(
            en="In use at the peak, by line (torch's code left out)",
            fr="Utilisé au pic, par ligne (code de torch omis)",
        )
        if snapshot.recorded
        else say(
            en="In use at the end, by line (torch's code left out)",
            fr="Utilisé à la fin, par ligne (code de torch omis)",
        )
    )
    return Table(head, tuple(cells), caption, align="lr", whole=1)


def _frame_row(row: FrameBytes, whole: int) -> tuple[str, ...]:
    share = percent(row.size_bytes / whole if whole else 0.0, 0)
    return frame_label(row.frame), format_bytes(row.size_bytes), share, integer(row.blocks)


def occupancy_table(snapshots: Iterable[MemorySnapshot]) -> Table:
    """Lay out what the segments hold when each snapshot was taken."""
    columns = list(snapshots)
    fields = (
        ("reserved_bytes", say(en="reserved (segments)", fr="réservé (segments)")),
        ("allocated_bytes", say(en="allocated, rounded up", fr="alloué, arrondi")),
        ("requested_bytes", say(en="asked for by tensors", fr="demandé par les tenseurs")),
        ("awaiting_bytes", say(en="freed, a stream uses it still", fr="libéré, encore utilisé par un flux")),
        ("free_bytes", say(en="free", fr="libre")),
        ("whole_free_bytes", say(en="of it whole segments", fr="dont segments entiers")),
        ("largest_free_bytes", say(en="largest free block", fr="plus grand bloc libre")),
    )
    rows = tuple(
        (title, *(format_bytes(getattr(column.occupancy, field, None)) for column in columns))
        for field, title in fields
    )
    caption = say(en="Segments at the end", fr="Segments à la fin")
    names = tuple(column.name for column in columns) if len(columns) > 1 else (say(en="bytes", fr="octets"),)
    return Table(("", *names), rows, caption, align="lr", whole=1)


def fragmentation_sentence(snapshot: MemorySnapshot) -> str:
    """Say how much reserved memory is free in pieces, and what would help."""
    facts = snapshot.occupancy
    if facts is None:
        return say(
            en="Fragmentation: unknown, as the snapshot has no segments.",
            fr="Fragmentation : inconnue, car l’instantané n’a pas de segments.",
        )
    pieces = facts.free_bytes - facts.whole_free_bytes
    share = pieces / facts.reserved_bytes if facts.reserved_bytes else 0.0
    advice = (
        say(en=" (its segments are expandable already)", fr=" (ses segments sont déjà extensibles)")
        if facts.expandable
        else say(
            en=": PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True may save it",
            fr=" : PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True peut l’éviter",
        )
        if share > LEAST_OTHER
        else ""
    )
    return say(
        en=f"Fragmentation: {format_bytes(pieces)} ({percent(share)} of the reserved memory) are free between blocks "
        "in use, "
        f"which empty_cache() cannot return; no allocation above {format_bytes(facts.largest_free_bytes)} fits into "
        f"what is reserved{advice}.",
        fr=f"Fragmentation : {format_bytes(pieces)} ({spaced_percent(share)} de la mémoire réservée) sont libres "
        "entre des blocs "
        "utilisés, ce que empty_cache() ne peut pas rendre ; aucune allocation de plus de "
        f"{format_bytes(facts.largest_free_bytes)} n’entre dans la mémoire réservée{advice}.",
    )


def growth_sentence(before: MemorySnapshot, after: MemorySnapshot, rows: tuple[FrameGrowth, ...]) -> str:
    """Say how the peaks differ, and which line most."""
    recorded = before.recorded and after.recorded
    first, second = (
        side.peak_bytes if recorded else sum(row.size_bytes for row in side.at_end) for side in (before, after)
    )
    what_en, what_fr = ("peak", "Pic") if recorded else ("in use at the end", "Utilisé à la fin")
    sentence = say(
        en=f"{what_en.capitalize()}: {format_bytes(first)} in {before.name}, {format_bytes(second)} in {after.name} "
        f"({_signed_bytes(second - first)}).",
        fr=f"{what_fr} : {format_bytes(first)} dans {before.name}, {format_bytes(second)} dans {after.name} "
        f"({_signed_bytes(second - first)}).",
    )
    if not rows or abs(rows[0].difference_bytes) <= LEAST_CHANGE * max(first, second):
        return sentence
    row = rows[0]
    blocks = f"{integer(row.before_blocks)} → {integer(row.after_blocks)}"
    return sentence + say(
        en=f" The largest difference: {frame_label(row.frame)}, {_signed_bytes(row.difference_bytes)} ({blocks} "
        "blocks).",
        fr=f" L’écart le plus grand : {frame_label(row.frame)}, {_signed_bytes(row.difference_bytes)} ({blocks} "
        "blocs).",
    )


def _signed_bytes(num_bytes: int) -> str:
    return "=" if not num_bytes else f"{'+' if num_bytes > 0 else '−'}{format_bytes(abs(num_bytes))}"


def growth_table(rows: tuple[FrameGrowth, ...]) -> Table:
    """List lines by how many bytes they hold in two snapshots, largest difference first."""
    head = titles(
        en="allocated at; before; after; difference; blocks", fr="alloué par; avant; après; différence; blocs"
    )
    cells = tuple(
        (
            frame_label(row.frame),
            format_bytes(row.before_bytes if row.before_blocks else None),
            format_bytes(row.after_bytes if row.after_blocks else None),
            _signed_bytes(row.difference_bytes),
            f"{integer(row.before_blocks)} → {integer(row.after_blocks)}",
        )
        for row in rows[:MOST_FRAMES]
    )
    caption = say(
        en=f"What grew and shrank, {len(cells)} of {integer(len(rows))} lines",
        fr=f"Ce qui a grandi et diminué, {len(cells)} lignes sur {integer(len(rows))}",
    )
    return Table(head, cells, caption, align="lr", whole=1)
