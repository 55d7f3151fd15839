"""Orders of synchronous schedules: naive, GPipe, 1F1B, interleaved, TeraPipe, BPipe; and what all orders share.

- One stage per rank (naive, GPipe, 1F1B, eager 1F1B): the schedules differ only in how many forwards a rank runs ahead
  of its backwards: 1, all, p − r, or 2(p − r) − 1.
- Several chunks per rank (interleaved 1F1B, looped BFS, interleaved zero bubble): stage s is on rank s mod p, so that a
  micro-batch passes the ranks v times and a bubble costs a v-th, for (vp − 1)/(p − 1) times as many messages.
- TeraPipe pipelines slices of each sequence: forwards from the first token on, because causal attention looks back
  only, backwards from the last token on.
- BPipe is 1F1B whose first ranks lend activations to its last ones: no rank keeps more than ⌈(p + 2) / 2⌉ micro-batches
  where transfers take no time.
"""

from __future__ import annotations

from collections import Counter
from itertools import count
from pathlib import Path

from dlojz.base.language import Said, Sentences
from dlojz.pipeline.schedule import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    EVICT,
    FORWARD,
    LOAD,
    Action,
    Schedule,
    overlapped,
)

TEXTS = Sentences(Path(__file__).parent / "data" / "synchronous.md")


class OrderBuilder:
    """Order of one rank, written action by action; each takes the next micro-batch of its stage.

    Args:
        first_micro_batches: number of the first of each pipe (bidirectional schedules number them over both).
    """

    def __init__(self, first_micro_batches: tuple[int, ...] = (0,)) -> None:
        self.actions: list[Action] = []
        self._first = first_micro_batches
        self._written: Counter[tuple[str, int, int]] = Counter()
        self._pending: list[Action] = []

    def forward(self, stage: int, pipe: int = 0) -> None:
        """Pass the next micro-batch forward."""
        self.actions.append(self._next(FORWARD, stage, pipe))

    def backward(self, stage: int, pipe: int = 0) -> None:
        """Pass the next micro-batch backward, whole."""
        self.actions.append(self._next(BACKWARD, stage, pipe))

    def backward_input(self, stage: int, pipe: int = 0) -> None:
        """Pass the next micro-batch backward for the input; its weight gradients are left to `weight`."""
        action = self._next(BACKWARD_INPUT, stage, pipe)
        self.actions.append(action)
        self._pending.append(action)

    def weight(self, stage: int | None = None) -> None:
        """Compute the weight gradients that wait longest (of one stage, or of any), if any wait."""
        for number, action in enumerate(self._pending):
            if stage is None or action.stage == stage:
                self.actions.append(self._pending.pop(number)._replace(kind=BACKWARD_WEIGHT))
                return

    def both(self, forward: tuple[int, int], backward: tuple[int, int]) -> None:
        """Overlap a forward and a whole backward, each given as (stage, pipe)."""
        self.actions.append(overlapped(self._next(FORWARD, *forward), self._next(BACKWARD, *backward)))

    def rest(self) -> None:
        """Compute all weight gradients that still wait."""
        while self._pending:
            self.weight()

    def _next(self, kind: str, stage: int, pipe: int) -> Action:
        # B and I share a counter: both are the backward of a micro-batch.
        key = (FORWARD if kind == FORWARD else BACKWARD, stage, pipe)
        micro_batch = self._first[pipe] + self._written[key]
        self._written[key] += 1
        return Action(kind, stage, micro_batch, pipe)


def looped(ranks: int, chunks: int) -> tuple[int, ...]:
    """Place stages round the ranks: stage s on rank s mod p (Narayanan et al. 2021, §2.2)."""
    return tuple(stage % ranks for stage in range(ranks * chunks))


def zigzag(ranks: int, chunks: int) -> tuple[int, ...]:
    """Place stages back and forth over the ranks: 0…p−1, p−1…0, … (a V for two chunks)."""
    ranks_down = tuple(range(ranks))
    return tuple(rank for chunk in range(chunks) for rank in (ranks_down if chunk % 2 == 0 else ranks_down[::-1]))


def counted(schedule: str, **counts: int) -> None:
    """Refuse counts that are not whole numbers of at least 1."""
    french = {"ranks": "rangs", "chunks": "étages par rang", "waves": "vagues", "group": "micro-batches par groupe"}
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            title = Said(name, f"{name} ({french[name]})" if name in french else name)
            raise TEXTS.refusal("sizes", "not whole", schedule=schedule, name=title, value=value)


def need_chunks(schedule: str, chunks: int, instead: str) -> None:
    """Refuse fewer than two chunks per rank; `instead` is the schedule that has one."""
    counted(schedule, chunks=chunks)
    if chunks < 2:
        raise TEXTS.refusal("sizes", "chunks", schedule=schedule, chunks=chunks, instead=instead)


def need_micro_batches(schedule: str, micro_batches: int, minimum: int, rule: str, instead: str) -> None:
    """Refuse fewer micro-batches than the schedule's warm-up takes; `rule` is the formula of `minimum`."""
    if micro_batches < minimum:
        counts = {"minimum": minimum, "micro_batches": micro_batches}
        raise TEXTS.refusal("sizes", "micro-batches", schedule=schedule, rule=rule, instead=instead, **counts)


def need_even_ranks(schedule: str, ranks: int, instead: str) -> None:
    """Refuse an odd number of ranks: the two directions of a bidirectional schedule meet between two middle ranks."""
    if ranks % 2:
        counts = {"ranks": ranks, "below": max(2, ranks - 1), "above": ranks + 1}
        raise TEXTS.refusal("sizes", "even ranks", schedule=schedule, instead=instead, **counts)


def need_multiple(schedule: str, micro_batches: int, unit: int, reason: tuple[str, str]) -> None:
    """Refuse micro-batches that are no multiple of `unit`; `reason` is the reason in English and in French."""
    if micro_batches % unit:
        below, above = micro_batches // unit * unit, (micro_batches // unit + 1) * unit
        choices = Said(f"{below} or {above}", f"{below} ou {above}") if below else above
        counts = {"unit": unit, "micro_batches": micro_batches}
        raise TEXTS.refusal("sizes", "multiple", schedule=schedule, reason=Said(*reason), choices=choices, **counts)


def naive(ranks: int, micro_batches: int) -> Schedule:
    """Order naive model parallelism: one micro-batch at a time through all stages and back, on one rank at a time.

    Source: Huang et al. 2019 (GPipe, arXiv 1811.06965), Fig. 2b.
    """
    return _ahead("naive", ranks, micro_batches, [1] * ranks)


def gpipe(ranks: int, micro_batches: int, *, lifo: bool = False) -> Schedule:
    """Order GPipe: all forwards, then all backwards; every rank keeps the activations of all micro-batches.

    `lifo`: backwards begin with the last micro-batch (the paper's figure) rather than with the first (torch).

    Source: Huang et al. 2019 (arXiv 1811.06965), §2.3 and Fig. 2c.
    """
    counted("gpipe", ranks=ranks, micro_batches=micro_batches)
    numbers = range(micro_batches)
    backwards = numbers[::-1] if lifo else numbers
    orders = [
        [Action(FORWARD, rank, number) for number in numbers] + [Action(BACKWARD, rank, number) for number in backwards]
        for rank in range(ranks)
    ]
    return Schedule.of("gpipe", orders, range(ranks), micro_batches)


def one_f_one_b(ranks: int, micro_batches: int) -> Schedule:
    """Order 1F1B (DAPPLE, PipeDream-Flush): rank r runs min(p − r, m) forwards, then one backward, one forward in turn.

    Its bubble is GPipe's, but rank r keeps at most min(p − r, m) micro-batches.

    Sources: Fan et al. 2021 (DAPPLE, arXiv 2007.01045); Narayanan et al. 2021 (PipeDream-Flush, arXiv 2006.09503)
    and Megatron-LM (arXiv 2104.04473), §2.2.
    """
    return _ahead("1f1b", ranks, micro_batches, [ranks - rank for rank in range(ranks)])


def eager_one_f_one_b(ranks: int, micro_batches: int) -> Schedule:
    """Order eager 1F1B: min(2(p − r) − 1, m) forwards first, so that a message may travel during one more action.

    Without latency it lasts as long as 1F1B and keeps nearly twice as much; with latency it loses 2(p − 1) hops only.

    Source: Zhuang et al. 2023 (arXiv 2211.05322); DAPPLE's policy P_B (arXiv 2007.01045).
    """
    return _ahead("eager-1f1b", ranks, micro_batches, [2 * (ranks - rank) - 1 for rank in range(ranks)])


def _ahead(name: str, ranks: int, micro_batches: int, ahead: list[int]) -> Schedule:
    """So many forwards first, then backward and forward in turn, then the backwards that remain."""
    counted(name, ranks=ranks, micro_batches=micro_batches)
    passes = [(0, number) for number in range(micro_batches)]
    orders = [
        _in_turn(
            _on_rank(passes, rank, ranks, FORWARD),
            _on_rank(passes, rank, ranks, BACKWARD),
            # Less one: `_in_turn` begins its turns with a forward.
            min(ahead[rank], micro_batches) - 1,
        )
        for rank in range(ranks)
    ]
    return Schedule.of(name, orders, range(ranks), micro_batches)


def interleaved(ranks: int, micro_batches: int, chunks: int = 2, group: int | None = None) -> Schedule:
    """Order interleaved 1F1B: 1F1B over (micro-batch, chunk) pairs, a group of micro-batches through each chunk.

    Rank r runs 2(p − 1 − r) + (v − 1)·g forwards, then one forward, one backward in turn. The k-th forward belongs to
    chunk (k div g) mod v and to micro-batch (k div gv)·g + k mod g; the k-th backward to chunk v − 1 − that.

    Args:
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
        warm_up = min(2 * (ranks - 1 - rank) + (chunks - 1) * group, len(forwards))
        of_rank = _on_rank(forwards, rank, ranks, FORWARD), _on_rank(backwards, rank, ranks, BACKWARD)
        orders.append(_in_turn(*of_rank, warm_up))
    return Schedule.of("interleaved", orders, looped(ranks, chunks), micro_batches)


def looped_bfs(ranks: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """Order looped breadth-first: all micro-batches through the first chunk, then through the next; back in reverse.

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
    """Order interleaved 1F1B with split backwards: weight gradients are postponed to fill bubbles.

    Rank r runs (p − 1 − r) + (v − 1)·g forwards, then one forward, one backward for the input in turn; after the j-th
    (from 1) of these, one backward for the weights if j > r, so that r of them remain for the end. With one chunk it is
    ZB-H1. Numbers as for `interleaved`, v from 1 on.

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
    """Order 1F1B with split backwards, `lag[r]` of whose weight parts rank r postpones to the end.

    Args:
        chunks: stages per rank.
        group: micro-batches that pass a chunk together.
        ahead: forwards that each rank runs before it begins to alternate.
        lag: after its j-th backward for the input (from 1) rank r runs one for the weights if j > lag[r].
        barrier: whether the optimizer waits for every rank.
    """
    forwards, backwards = _passes(micro_batches, chunks, group)
    orders = []
    for rank in range(ranks):
        warm_up = min(ahead[rank], len(forwards))
        inputs = _on_rank(backwards, rank, ranks, BACKWARD_INPUT)
        weights = _on_rank(backwards, rank, ranks, BACKWARD_WEIGHT)
        order: list[Action] = []
        num_inputs = 0
        for action in _in_turn(_on_rank(forwards, rank, ranks, FORWARD), inputs, warm_up):
            order.append(action)
            if action.kind == BACKWARD_INPUT:
                num_inputs += 1
                if num_inputs > lag[rank]:
                    # That of the backward which came `lag[rank]` before.
                    order.append(weights[num_inputs - lag[rank] - 1])
        # Then those that were put off.
        orders.append(order + weights[max(0, num_inputs - lag[rank]) :])
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


def _in_turn(forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    """`warm_up` forwards, then forward and backward in turn, then the backwards that remain."""
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [forward, backward]
    # After the last forward, `warm_up` backwards are left.
    return order + backwards[len(forwards) - warm_up :]


def _group(schedule: str, ranks: int, micro_batches: int, group: int | None) -> int:
    """Micro-batches that pass a chunk together."""
    counted(schedule, ranks=ranks, micro_batches=micro_batches)
    if group is None:
        rounds = max(1, micro_batches // ranks)
        if micro_batches % rounds:
            # The nearest numbers of micro-batches that fit, below and above.
            below, above = (
                next(n for n in count(micro_batches + step, step) if n % max(1, n // ranks) == 0) for step in (-1, 1)
            )
            counts = {"rounds": rounds, "micro_batches": micro_batches, "ranks": ranks, "below": below, "above": above}
            raise TEXTS.refusal("groups", "unequal rounds", schedule=schedule, **counts)
        return micro_batches // rounds
    counted(schedule, group=group)
    minimum = min(ranks, micro_batches)
    # 0: the last group is a full one.
    remainder = micro_batches % group
    if group < minimum or (0 < remainder < minimum and group < micro_batches):
        counts = {"minimum": minimum, "group": group, "micro_batches": micro_batches, "ranks": ranks}
        raise TEXTS.refusal("groups", "too small", schedule=schedule, rest=min(group, remainder or group), **counts)
    return min(group, micro_batches)


def terapipe(ranks: int, micro_batches: int, token_slices: int) -> Schedule:
    """Order TeraPipe, GPipe over (micro-batch, token slice): all forwards, then all backwards, on every rank.

    Slices run in order forwards and in reverse backwards. A rank keeps everything, like GPipe; a boundary is passed by
    as many bytes as in GPipe, in `token_slices` times as many messages. Times of the slices are `Costs.slice_times`;
    `validity.plan_slices` finds the best lengths. Needs a causal attention.

    Source: Li et al. 2021, TeraPipe (arXiv 2102.07988), §3.2.

    Raises:
        LabError: for fewer than one rank, micro-batch or slice.
    """
    counted("terapipe", ranks=ranks, micro_batches=micro_batches, token_slices=token_slices)
    slices = range(token_slices)
    orders = [
        [
            Action(FORWARD, rank, micro_batch, token_slice=part)
            for micro_batch in range(micro_batches)
            for part in slices
        ]
        + [
            Action(BACKWARD, rank, micro_batch, token_slice=part)
            for micro_batch in range(micro_batches)
            for part in reversed(slices)
        ]
        for rank in range(ranks)
    ]
    return Schedule.of("terapipe", orders, list(range(ranks)), micro_batches, token_slices=token_slices)


def bpipe(ranks: int, micro_batches: int) -> Schedule:
    """Order BPipe, 1F1B with evictions: rank r sends activations to rank p − 1 − r and loads them back.

    In 1F1B rank r keeps min(p − r, m) micro-batches, its partner r + 1: p + 1 together. A rank that would keep more
    than `most_kept` evicts its latest micro-batch, whose backward is the farthest away, right after its forward, so
    that a backward hides the transfer; it loads it back just before the forward that precedes its backward, so that
    this forward hides the transfer. Each transfer is one stage's activations of one micro-batch.

    The simulator lets nobody wait for an eviction to arrive: with a slow link a rank's peak rises by what is still
    under way. A backward does wait for its load.

    Source: Kim et al. 2023, BPipe: Memory-Balanced Pipeline Parallelism for Training Large Language Models (ICML), §3;
    the exact places of evictions and loads are ours.

    Raises:
        LabError: for fewer than one rank or micro-batch.
    """
    counted("bpipe", ranks=ranks, micro_batches=micro_batches)
    limit = most_kept(ranks)
    plain = one_f_one_b(ranks, micro_batches)
    orders = [_evicting(list(order), rank, limit) for rank, order in enumerate(plain.orders)]
    return Schedule.of("bpipe", orders, list(range(ranks)), micro_batches)


def most_kept(ranks: int) -> int:
    """Bound the micro-batches on a rank of BPipe: ⌈(p + 2) / 2⌉.

    A pair holds p + 1, and one micro-batch is with both while evictions and loads pass each other (derived; Kim et al.
    2023 state the bound).
    """
    return (ranks + 3) // 2


def _evicting(order: list[Action], stage: int, limit: int) -> list[Action]:
    """The same order with evictions and loads, so that at most `limit` micro-batches are here at a time."""
    new_order: list[Action] = []
    resident: list[int] = []  # in the order of their forwards
    away: list[int] = []

    def evict() -> None:
        victim = resident.pop()
        away.append(victim)
        # Right after its forward, which may lie some actions back.
        new_order.insert(new_order.index(Action(FORWARD, stage, victim)) + 1, Action(EVICT, stage, victim))

    def load(micro_batch: int) -> None:
        away.remove(micro_batch)
        resident.insert(0, micro_batch)  # its backward is the next
        new_order.append(Action(LOAD, stage, micro_batch))

    for number, action in enumerate(order):
        if action.kind == FORWARD:
            following = next((step.micro_batch for step in order[number:] if step.kind == BACKWARD), None)
            # The next backward needs activations that are away, and comes right after this forward.
            must_load = following in away and order[number + 1].kind == BACKWARD
            # Room for this forward, and for what is loaded before it.
            while len(resident) + 1 + must_load > limit:
                evict()
            if must_load and following is not None:
                load(following)
            resident.append(action.micro_batch)
        new_order.append(action)
        if action.kind == BACKWARD:
            resident.remove(action.micro_batch)
            if all(step.kind == BACKWARD for step in order[number + 1 :]):  # the drain: only backwards are left
                while away and len(resident) < limit:
                    load(min(away))
    return new_order
