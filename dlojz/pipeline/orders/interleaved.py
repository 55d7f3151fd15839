"""Schedules with several chunks per rank that go round: interleaved 1F1B, looped BFS, interleaved zero bubble.

Layer 2. Invariant: stage s is on rank s mod p, so that a micro-batch goes round the ranks v times and a bubble costs a
v-th of what it costs with one chunk, for v times as many messages.
"""

from __future__ import annotations

from dlojz.pipeline.action import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action
from dlojz.pipeline.orders.writing import counted, looped, need_chunks
from dlojz.pipeline.schedule import Schedule
from dlojz.schema import LabError
from dlojz.text import say


def interleaved(ranks: int, micro_batches: int, chunks: int = 2, group: int | None = None) -> Schedule:
    """Interleaved 1F1B: 1F1B over (micro-batch, chunk) pairs, a group of micro-batches through each chunk in turn.

    Rank r runs 2(p − 1 − r) + (v − 1)·g forwards, then one forward, one backward in turn. The k-th forward belongs to
    chunk (k div g) mod v and to micro-batch (k div gv)·g + k mod g; the k-th backward to chunk v − 1 − that.

    Args:
        ranks: number of ranks p.
        micro_batches: m. Without `group`, m must be a multiple of max(1, m div p), as in torch; multiples of p always
            are.
        chunks: stages per rank v, at least 2.
        group: micro-batches g that pass a chunk together; by default m / max(1, m div p), which is p if p divides m.
            The last group may be smaller, but not than p (Megatron-LM's rule).

    Raises:
        LabError: if the numbers do not fit.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), §2.2; Megatron-LM's `get_schedule_table`; torch's flexible rounds.
    """
    need_chunks("interleaved", chunks, "1f1b")
    group = _group("interleaved", ranks, micro_batches, group)
    forwards, backwards = _passes(micro_batches, chunks, group)
    orders = []
    for rank in range(ranks):
        first = min(2 * (ranks - 1 - rank) + (chunks - 1) * group, len(forwards))
        of_rank = _on_rank(forwards, rank, ranks, FORWARD), _on_rank(backwards, rank, ranks, BACKWARD)
        orders.append(_in_turn(*of_rank, first))
    return Schedule.of("interleaved", orders, looped(ranks, chunks), micro_batches)


def looped_bfs(ranks: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """Looped breadth-first: all micro-batches through the first chunk, then through the next; back in reverse.

    Each chunk's weights are needed in one stretch per pass, so that fully sharded weights are gathered once per pass.

    Source: Lamy-Poirier 2023 (Breadth-First Pipeline Parallelism, arXiv 2211.05953); order of micro-batches in the
    backward as in torch's ScheduleLoopedBFS.
    """
    need_chunks("looped-bfs", chunks, "gpipe")
    counted("looped-bfs", ranks=ranks, micro_batches=micro_batches)
    forwards = [(chunk, number) for chunk in range(chunks) for number in range(micro_batches)]
    orders = [
        _on_rank(forwards, rank, ranks, FORWARD) + _on_rank(forwards[::-1], rank, ranks, BACKWARD)
        for rank in range(ranks)
    ]
    return Schedule.of("looped-bfs", orders, looped(ranks, chunks), micro_batches)


def interleaved_zero_bubble(ranks: int, micro_batches: int, chunks: int = 2, group: int | None = None) -> Schedule:
    """Interleaved 1F1B with split backwards: weight gradients are put off until they fill what would be a bubble.

    Rank r runs (p − 1 − r) + (v − 1)·g forwards, then one forward, one backward for the input in turn; after the j-th
    (from 1) of these, one backward for the weights if j > r, so that r of them stay put off until the end. With one
    chunk it is ZB-H1.

    Args:
        ranks: number of ranks p.
        micro_batches: m, with `interleaved`'s rule.
        chunks: stages per rank v, at least 1.
        group: micro-batches that pass a chunk together, as in `interleaved`.

    Raises:
        LabError: if the numbers do not fit.

    Source: Qi et al. 2024 (arXiv 2401.10241), §2.1, over chunks; torch's ScheduleInterleavedZeroBubble.
    """
    counted("interleaved-zb", chunks=chunks)
    group = _group("interleaved-zb", ranks, micro_batches, group)
    return put_off(
        "interleaved-zb",
        ranks,
        micro_batches,
        chunks,
        group,
        ahead=[ranks - 1 - rank + (chunks - 1) * group for rank in range(ranks)],
        lag=list(range(ranks)),
    )


def put_off(
    name: str,
    ranks: int,
    micro_batches: int,
    chunks: int,
    group: int,
    *,
    ahead: list[int],
    lag: list[int],
    barrier: bool = True,
) -> Schedule:
    """1F1B with split backwards, `lag[r]` of which keep waiting for their weight part on rank r until the end.

    Args:
        name: the schedule's name.
        ranks: number of ranks.
        micro_batches: number of micro-batches.
        chunks: stages per rank.
        group: micro-batches that pass a chunk together.
        ahead: forwards that each rank runs before it begins to alternate.
        lag: after its j-th backward for the input (from 1) rank r runs one for the weights if j > lag[r].
        barrier: whether the optimizer waits for every rank.
    """
    forwards, backwards = _passes(micro_batches, chunks, group)
    orders = []
    for rank in range(ranks):
        first = min(ahead[rank], len(forwards))
        inputs = _on_rank(backwards, rank, ranks, BACKWARD_INPUT)
        weights = _on_rank(backwards, rank, ranks, BACKWARD_WEIGHT)
        order: list[Action] = []
        done = 0
        for action in _in_turn(_on_rank(forwards, rank, ranks, FORWARD), inputs, first):
            order.append(action)
            if action.kind == BACKWARD_INPUT:
                done += 1
                if done > lag[rank]:
                    order.append(weights[done - lag[rank] - 1])
        orders.append(order + weights[max(0, done - lag[rank]) :])
    return Schedule.of(name, orders, looped(ranks, chunks), micro_batches, barrier=barrier)


def _passes(micro_batches: int, chunks: int, group: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(chunk, micro-batch) of every forward and of every backward of a rank, in order."""
    forwards, backwards = [], []
    for start in range(0, micro_batches, group):
        numbers = range(start, min(start + group, micro_batches))
        forwards += [(chunk, number) for chunk in range(chunks) for number in numbers]
        backwards += [(chunk, number) for chunk in reversed(range(chunks)) for number in numbers]
    return forwards, backwards


def _on_rank(passes: list[tuple[int, int]], rank: int, ranks: int, kind: str) -> list[Action]:
    return [Action(kind, chunk * ranks + rank, number) for chunk, number in passes]


def _in_turn(forwards: list[Action], backwards: list[Action], first: int) -> list[Action]:
    """`first` forwards, then forward and backward in turn, then the backwards that remain."""
    order = forwards[:first]
    for forward, backward in zip(forwards[first:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - first :]


def _group(schedule: str, ranks: int, micro_batches: int, group: int | None) -> int:
    """Micro-batches that pass a chunk together."""
    counted(schedule, ranks=ranks, micro_batches=micro_batches)
    if group is None:
        rounds = max(1, micro_batches // ranks)
        if micro_batches % rounds:
            below, above = (_nearest(ranks, micro_batches, step) for step in (-1, 1))
            raise LabError(
                say(
                    en=f"{schedule} runs the micro-batches in m div p = {rounds} equal rounds, but {micro_batches} "
                    f"micro-batches on {ranks} ranks cannot be shared out so: take {below} or {above} (a multiple of "
                    f"{ranks} always works), or give group.",
                    fr=f"{schedule} passe les micro-batches en m div p = {rounds} tours égaux, mais {micro_batches} "
                    f"micro-batches sur {ranks} rangs ne se partagent pas ainsi : prenez {below} ou {above} (un "
                    f"multiple de {ranks} convient toujours), ou donnez group.",
                )
            )
        return micro_batches // rounds
    counted(schedule, group=group)
    least = min(ranks, micro_batches)
    rest = micro_batches % group
    if group < least or (0 < rest < least and group < micro_batches):
        raise LabError(
            say(
                en=f"{schedule} needs groups of at least {least} micro-batches, the last one too, but group={group} "
                f"for {micro_batches} micro-batches on {ranks} ranks leaves one of {min(group, rest or group)}: take "
                f"group={micro_batches}, or a divisor of {micro_batches} that is at least {least}.",
                fr=f"{schedule} demande des groupes d’au moins {least} micro-batches, le dernier compris, mais "
                f"group={group} pour {micro_batches} micro-batches sur {ranks} rangs en laisse un de "
                f"{min(group, rest or group)} : prenez group={micro_batches}, ou un diviseur de {micro_batches} "
                f"supérieur ou égal à {least}.",
            )
        )
    return min(group, micro_batches)


def _nearest(ranks: int, micro_batches: int, step: int) -> int:
    micro_batches += step
    while micro_batches % max(1, micro_batches // ranks):
        micro_batches += step
    return micro_batches
