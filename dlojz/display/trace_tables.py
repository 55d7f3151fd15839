"""Tables and sentences of profiler traces and memory snapshots.

Of all ranks: clocks, shares, stragglers, the pipeline, the causes; of one rank; of two traces of one program; of memory
snapshots.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median

from dlojz.base.language import Sentences, colon, decimal, format_bytes, format_seconds, integer, minus, percent, say
from dlojz.base.table import Table, titles, visible
from dlojz.display.collective_text import format_latency
from dlojz.display.style import label
from dlojz.display.tables import DASH
from dlojz.pipeline.analysis import CAUSES, idle_by_cause
from dlojz.pipeline.analysis import title_of as cause_title
from dlojz.pipeline.schedule_catalogue import entry
from dlojz.pipeline.traced_pipeline import (
    HeadOfLine,
    ScheduleMatch,
    TracedPipeline,
    head_of_line,
    message_waits,
    slow_stage,
)
from dlojz.results.memory_snapshot import AUTOGRAD, BEFORE, NO_FRAME, FrameBytes, FrameGrowth, MemorySnapshot
from dlojz.results.rank_activities import AlignedRanks, CollectiveShare, RankShares, Straggler
from dlojz.results.rank_profile import (
    LAUNCH_BOUND,
    MOST_SECONDS_APART,
    Change,
    DeviceIdling,
    ProfileComparison,
    RankProfile,
)

phrase = Sentences(Path(__file__).parent / "data" / "trace_tables.md", visible=visible, latency=format_latency)

MOST_WAITS, MOST_BLOCKED = 3, 4
"""Of each kind, how many causes are told, and how many names in one of them."""
MOST_KINDS, MOST_KIND_LETTERS = 8, 24
"""Kinds of communication that are listed, and letters of their names."""
SLOWER = 1.1
"""A stage that takes this many times the mean is told as slow."""
LEAST_STRAGGLING = 0.01
"""Waiting for a rank is told from this part of the time on."""
MORE_THAN_ITS_TURN = 1.4
"""A straggler causes this many times the waiting that it would if all ranks came late by turns."""
MOST_KERNELS, MOST_FRAMES, MOST_LETTERS = 8, 10, 46
LEAST_CHANGE = 0.02
"""Part of the time, or of the peak, below which a difference is said to be none worth a sentence."""
LEAST_OTHER = 0.05
_NAMESPACES = ("void ", "at::native::", "(anonymous namespace)::", "c10::", "std::")


def clock_sentence(aligned: AlignedRanks) -> str:
    """Say how the clocks of the ranks were aligned."""
    ranks = len(aligned.ranks)
    # inf: no collective and no pair of messages ties this clock to the others.
    free = [trace.rank for trace, unsure in zip(aligned.ranks, aligned.uncertain_s, strict=True) if math.isinf(unsure)]
    shift = max(aligned.shifts_s, key=abs)
    worst = max((unsure for unsure in aligned.uncertain_s if math.isfinite(unsure)), default=0.0)
    if free:
        names = ", ".join(map(str, free))
        return phrase("clocks not tied", ranks=ranks, names=names)
    if not shift:
        return phrase("clocks agree", ranks=ranks, worst=worst)
    return phrase("clocks aligned", ranks=ranks, shift=abs(shift), worst=worst)


def missing_sentence(aligned: AlignedRanks) -> str:
    """Name the ranks whose traces were not given; empty where all are there."""
    size = max((trace.world_size or 0 for trace in aligned.ranks), default=0)
    # The size of the job, as the traces say it, less the ranks that were read.
    absent = sorted(set(range(size)) - {trace.rank for trace in aligned.ranks})
    if not absent:
        return ""
    names = ", ".join(map(str, absent[:8])) + (", …" if len(absent) > 8 else "")
    return phrase("traces not given", names=names, size=size)


def shares_table(shares: tuple[RankShares, ...], length_s: float) -> Table:
    """List what each rank does with its time."""
    head = phrase.titles("columns of shares")
    rows = tuple(
        (
            str(share.rank),
            *(
                f"{format_seconds(seconds)} ({percent(seconds / length_s if length_s else 0.0, 0)})"
                for seconds in (share.computing_s, share.hidden_s, share.exposed_s, share.waited_s, share.idle_s)
            ),
        )
        for share in shares
    )
    caption = phrase("caption of shares", length_s=length_s)
    return Table(head, rows, caption, align="r", whole=1)


def collectives_table(collectives: tuple[CollectiveShare, ...]) -> Table:
    """List the kinds of communication, what is exposed most first."""
    head = titles(en="communication; number; time; exposed", fr="communication; nombre; temps; exposé")
    rows = tuple(
        (
            visible(row.kind)[:MOST_KIND_LETTERS],
            decimal(row.calls, 0),
            format_seconds(row.seconds),
            f"{format_seconds(row.exposed_s)} ({percent(row.exposed_s / row.seconds if row.seconds else 0.0, 0)})",
        )
        for row in collectives[:MOST_KINDS]
    )
    caption = say(en="Communication by kind, mean of the ranks", fr="Communication par type, moyenne des rangs")
    return Table(head, rows, caption, align="r", whole=1)


def straggler_sentences(stragglers: tuple[Straggler, ...], ranks: int, length_s: float) -> Iterator[str]:
    """Say which ranks the others wait for at collectives, by how much; or that they come late by turns."""
    if not stragglers:
        return
    waited_s = sum(row.waited_s for row in stragglers)
    # Waiting for a rank, as part of the time.
    late = [row for row in stragglers if row.waited_s > LEAST_STRAGGLING * length_s]
    # By turns each rank would cause 1 / ranks of all waiting.
    causing = [row for row in late if row.waited_s > MORE_THAN_ITS_TURN * waited_s / ranks]
    for row in causing[:MOST_WAITS]:
        yield phrase("straggler", row=row, waited_s=row.waited_s / length_s)
    if late and not causing:
        yield phrase(
            "late by turns",
            collectives=late[0].collectives,
            rank=late[0].rank,
            last=late[0].last,
            waited_s=waited_s / length_s,
        )
    if not late:
        yield phrase("no straggler", collectives=stragglers[0].collectives, least=LEAST_STRAGGLING)


def schedule_sentence(match: ScheduleMatch, pipeline: TracedPipeline) -> str:
    """Say which schedule of the catalogue the order is, or which is closest."""
    schedule = pipeline.overlay.measured.schedule
    size = phrase("size of a schedule", schedule=schedule)
    if match.names:
        also = ", ".join(match.names[1:])
        equivalents = say(en=f" (the same order as {also})", fr=f" (le même ordre que {also})") if also else ""
        name = f"{entry(match.names[0]).title()}, {match.names[0]}"
        return phrase("schedule", name=name, equivalents=equivalents, size=size)
    if match.first_difference is None:
        return phrase("schedule unknown", size=size)
    rank, actual, expected = match.first_difference
    return phrase(
        "closest schedule", match=match, rank=pipeline.ranks[rank], actual=actual, expected=expected, size=size
    )


def overlay_sentences(pipeline: TracedPipeline) -> Iterator[str]:
    """Say length and bubble of the step beside its simulation."""
    from dlojz.display.figures.partition_figures import bubble_sentence, step_sentence  # matplotlib

    simulated, measured = pipeline.overlay.simulated, pipeline.overlay.measured
    yield phrase("step beside its simulation", step=pipeline.step + 1, pipeline=pipeline)
    yield f"  {step_sentence(simulated, measured)}"
    yield f"  {bubble_sentence(simulated, measured)}"


def bubble_table(pipeline: TracedPipeline) -> Table:
    """List the bubble of each rank, measured and simulated, and its causes."""
    simulated, measured = pipeline.overlay.simulated, pipeline.overlay.measured
    causes = idle_by_cause(measured, pipeline.overlay.costs)
    # Causes that no rank has get no column.
    present_causes = [cause for cause in CAUSES if any(of_rank[cause] > 0 for of_rank in causes)]
    head = (
        *titles(en="rank; bubble; simulated", fr="rang; bulle; simulée"),
        *(cause_title(cause) for cause in present_causes),
    )
    rows = tuple(
        (
            str(rank),
            # `or 1.0` guards against a step of length 0.
            f"{format_seconds(measured.idle[index])} ({percent(measured.idle[index] / (measured.makespan or 1.0), 0)})",
            format_seconds(simulated.idle[index]),
            *(format_seconds(causes[index][cause]) for cause in present_causes),
        )
        for index, rank in enumerate(pipeline.ranks)
    )
    return Table(head, rows, say(en="Bubble of each rank", fr="Bulle de chaque rang"), align="r", whole=1)


def cause_sentences(pipeline: TracedPipeline) -> Iterator[str]:
    """Say why the ranks of a pipeline wait: blocked messages, a slow stage, the longest waits beyond the schedule's."""
    blocked, waits = head_of_line(pipeline), message_waits(pipeline)
    if blocked or waits:
        yield phrase("names of actions and receives" if blocked else "names of actions")
    for row in blocked[:MOST_WAITS]:
        yield _blocked_sentence(row)
    if len(blocked) > MOST_WAITS:
        # A rank may be held up by several messages at one action: its idle time counts once.
        idle_s = sum({(row.delayed_rank, row.delayed_action): row.idle_s for row in blocked}.values())
        yield phrase("messages that hold up others", messages=len(blocked), idle_s=idle_s)
    slow = slow_stage(pipeline)
    if slow.seconds > SLOWER * slow.mean_s:
        yield phrase("slowest stage", slow=slow, seconds=slow.seconds / slow.mean_s)
    for wait in waits[:MOST_WAITS]:
        yield phrase("rank waits for a message", wait=wait)
    if not waits:
        yield say(en="No rank waits for a message.", fr="Aucun rang n’attend de message.")


def _blocked_sentence(row: HeadOfLine) -> str:
    queue = ", ".join(row.blocked[:MOST_BLOCKED]) + (", …" if len(row.blocked) > MOST_BLOCKED else "")
    # A receive at the head waits for its message; a send at the head waits for the receive to be posted.
    return phrase("receive blocks" if "RECV" in row.blocker else "send blocks", row=row, queue=queue)


# ---- one rank


def kernel_kind(kind: str) -> str:
    """Translate a kind of kernel."""
    return label("kernel", kind)


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
        return phrase("profile without steps", rank=rank, on=on, profile=profile)
    shortest, longest = min(profile.steps_s), max(profile.steps_s)
    middle = median(profile.steps_s)
    return phrase(
        "profile of steps", rank=rank, on=on, profile=profile, median_s=middle, shortest_s=shortest, longest_s=longest
    )


def parts_table(profile: RankProfile) -> Table:
    """Divide the time into computing, exposed communication and idle; hidden communication beside."""
    head = titles(en="; time; per step", fr="; temps; par pas")
    rows = tuple(
        (kernel_kind(part), _share(seconds, profile.length_s), format_latency(seconds / profile.steps))
        for part, seconds in profile.parts_s.items()
    )
    caption = phrase("caption of parts", profile=profile)
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
    caption = phrase("kernels by kind" if profile.log.on_device else "operators by kind")
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
    names = f"{len(rows)} / {integer(len(profile.kernels))}"
    caption = phrase("costly kernels" if profile.log.on_device else "costly operators", names=names)
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
        yield phrase("launch-bound: not recorded" if profile.launches else "launch-bound: no device", profile=profile)
        return
    if facts.bound is None:
        yield phrase("launch-bound: unknown", unknown=facts.kernels - facts.known, facts=facts)
        return
    share = percent(facts.running_s / facts.length_s if facts.length_s else 0.0)
    figures = phrase("medians of launches", facts=facts)
    limit = percent(LAUNCH_BOUND, 0)
    yield phrase("launch-bound" if facts.bound else "not launch-bound", share=share, limit=limit, figures=figures)
    yield from _idle_sentence(facts)


def _idle_sentence(facts: DeviceIdling) -> Iterator[str]:
    reasons = {
        phrase("idle: running"): facts.running_s,
        phrase("idle: loading"): facts.loading_s,
        phrase("idle: synchronised", facts=facts): facts.synchronised_s,
        phrase("idle: queued"): facts.queued_s,
        phrase("idle: unknown"): facts.unknown_s,
    }
    longest = sorted(((seconds, reason) for reason, seconds in reasons.items() if seconds > 0), reverse=True)
    if longest:
        listed = say(en="; ", fr=" ; ").join(
            f"{format_latency(seconds)}{colon()}{reason}" for seconds, reason in longest
        )
        yield phrase("why the device idles", reasons=listed)


def unknown_sentences(profile: RankProfile) -> Iterator[str]:
    """Say what the trace of one rank alone does not show."""
    if not profile.communication and profile.world_size in (None, 1):
        yield phrase("no communication")
    else:
        yield phrase("unknown from one rank")
    busy_s = sum(row.seconds for row in profile.kinds)
    other_s = sum(row.seconds for row in profile.kinds if row.kind == "other")
    if profile.log.on_device and other_s > LEAST_OTHER * busy_s:
        yield phrase("kinds not recognised", share=other_s / busy_s)
    if profile.outside:
        yield phrase("outside of the steps", profile=profile)
    if profile.repeated:
        yield phrase("events twice", profile=profile)
    if profile.device_count > 1:
        yield phrase("several devices", profile=profile)


# ---- two traces


def _signed(seconds: float) -> str:
    # What rounding leaves of equal times is none.
    return "=" if abs(seconds) < MOST_SECONDS_APART else f"{'+' if seconds > 0 else '−'}{format_latency(abs(seconds))}"


def comparison_sentence(comparison: ProfileComparison) -> str:
    """Say how much longer the second takes, and what that is a figure of."""
    before, after, length = comparison.before, comparison.after, comparison.length
    share = length.difference_s / length.before_s if length.before_s else 0.0
    gap, difference = minus(percent(share, signed=True)), _signed(length.difference_s)
    if comparison.per_step:
        return phrase("steps compared", length=length, before=before, after=after, difference=difference, gap=gap)
    return phrase("traces compared", length=length, before=before, after=after, difference=difference, gap=gap)


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
        "kernels": phrase("caption of changes", rows=len(cells), names=len(rows)),
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
        yield phrase("part that changes most", part=kernel_kind(part.name), times=times)
    largest = comparison.kernels[0] if comparison.kernels else None
    if largest is None or abs(largest.difference_s) <= LEAST_CHANGE * length_s:
        yield phrase("no kernel changes", least=LEAST_CHANGE)
        return
    name, change = kernel_label(largest.name), _signed(largest.difference_s)
    if largest.by_calls_s is None:
        key, count = (
            ("kernel is new", largest.after_calls) if largest.after_calls else ("kernel is gone", largest.before_calls)
        )
        yield phrase(key, name=name, change=change, calls=decimal(count, 1))
        return
    mostly_calls = abs(largest.by_calls_s) > abs(largest.difference_s) / 2
    yield phrase(
        "kernel changes by its calls" if mostly_calls else "kernel changes by its time",
        name=name,
        change=change,
        calls=_calls(largest),
        before_s=largest.before_s / largest.before_calls,
        after_s=largest.after_s / largest.after_calls,
    )


def different_devices_sentence(comparison: ProfileComparison) -> str:
    """Say that the two ran on different GPUs, or steps are marked differently; empty where neither is so."""
    before, after = comparison.before, comparison.after
    if before.devices and after.devices and before.devices != after.devices:
        first, second = ", ".join(before.devices), ", ".join(after.devices)
        return phrase("different devices", first=first, second=second)
    if before.step_mark != after.step_mark:
        return phrase("steps marked differently", before=before, after=after)
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
        yield phrase(
            "peak of a snapshot",
            device=device,
            snapshot=snapshot,
            entries=entries,
            reserved=reserved,
            first_bytes=int(snapshot.in_use_bytes[0]),
            last_bytes=int(snapshot.in_use_bytes[-1]),
        )
    else:
        yield phrase("snapshot without a record", device=device, snapshot=snapshot)
    for asked, free in snapshot.out_of_memory[:1]:
        left = format_bytes(free)
        yield phrase("memory ran out", asked=asked, left=left, failures=len(snapshot.out_of_memory))
    if snapshot.other_devices:
        numbers = ", ".join(map(str, snapshot.other_devices))
        yield phrase("other devices", numbers=numbers)


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
    caption = phrase("in use at the peak") if snapshot.recorded else phrase("in use at the end")
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
        return phrase("fragmentation unknown")
    pieces = facts.free_bytes - facts.whole_free_bytes
    share = pieces / facts.reserved_bytes if facts.reserved_bytes else 0.0
    advice = "segments expandable" if facts.expandable else "expandable segments may save it"
    advice = phrase(advice) if facts.expandable or share > LEAST_OTHER else ""
    return phrase("fragmentation", pieces=pieces, share=share, facts=facts, advice=advice)


def growth_sentence(before: MemorySnapshot, after: MemorySnapshot, rows: tuple[FrameGrowth, ...]) -> str:
    """Say how the peaks differ, and which line most."""
    recorded = before.recorded and after.recorded
    first, second = (
        side.peak_bytes if recorded else sum(row.size_bytes for row in side.at_end) for side in (before, after)
    )
    sentence = phrase(
        "peaks compared" if recorded else "ends compared",
        first=first,
        before=before,
        second=second,
        after=after,
        difference=_signed_bytes(second - first),
    )
    if not rows or abs(rows[0].difference_bytes) <= LEAST_CHANGE * max(first, second):
        return sentence
    row = rows[0]
    blocks = f"{integer(row.before_blocks)} → {integer(row.after_blocks)}"
    return sentence + phrase(
        "largest growth", frame=frame_label(row.frame), difference=_signed_bytes(row.difference_bytes), blocks=blocks
    )


def _signed_bytes(num_bytes: int) -> str:
    return "=" if not num_bytes else f"{'+' if num_bytes > 0 else '−'}{format_bytes(abs(num_bytes))}"


def growth_table(rows: tuple[FrameGrowth, ...]) -> Table:
    """List lines by how many bytes they hold in two snapshots, largest difference first."""
    head = phrase.titles("columns of growth")
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
    caption = phrase("caption of growth", rows=len(cells), names=len(rows))
    return Table(head, cells, caption, align="lr", whole=1)
