"""Blocking sends: a rank that sends waits until the other side receives.

Layer 2. Invariant: same result as the buffered simulation where nobody ever waits to send; a set of ranks that wait for
each other's receive is reported as the cycle it is.

A rank receives just before the action that needs the message, and sends just after the action that made it.
"rendezvous" does these one after the other (first send what the last action made, then receive what the next one
needs), which deadlocks as soon as two neighbours send to each other; "paired" posts all of them together, which is what
`batch_isend_irecv` is for (Narayanan et al. 2021, Megatron-LM's `send_forward_recv_backward`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dlojz.pipeline.costs import Costs
from dlojz.pipeline.timeline import Timeline
from dlojz.schema import LabError
from dlojz.text import say

if TYPE_CHECKING:
    from dlojz.pipeline.schedule import Schedule


class Message(NamedTuple):
    """From the action that makes it to the action that needs it, both by number."""

    producer: int
    consumer: int


Step = int | tuple[Message, ...]
"""What a rank does next: run an action, or pass these messages (together)."""


def programs_of(schedule: Schedule, paired: bool) -> list[list[Step]]:
    """For each rank its actions with the sends and receives between them."""
    graph = schedule.graph
    receives: dict[int, list[Message]] = {}
    sends: dict[int, list[Message]] = {}
    rank = graph.rank.tolist()
    edges = [(needed, index) for index, needed in enumerate(graph.needs) if needed < graph.actions]
    for producer, consumer in edges + [(needed, index) for index, needed in graph.also]:
        if rank[producer] != rank[consumer]:
            message = Message(producer, consumer)
            sends.setdefault(producer, []).append(message)
            receives.setdefault(consumer, []).append(message)
    programs: list[list[Step]] = []
    for number in range(schedule.ranks):
        program: list[Step] = []
        waiting: list[Message] = []
        for index in range(schedule.first_of_rank[number], schedule.first_of_rank[number + 1]):
            waiting = waiting + receives.get(index, [])
            if waiting:
                program += [tuple(waiting)] if paired else [(message,) for message in waiting]
            program.append(index)
            waiting = list(sends.get(index, []))
        if waiting:
            program += [tuple(waiting)] if paired else [(message,) for message in waiting]
        programs.append(program)
    return programs


def simulate_blocking(schedule: Schedule, costs: Costs, durations: Sequence[float]) -> Timeline:
    """Start and end of every action where sends block.

    Raises:
        LabError: if ranks wait for each other, with the cycle.
    """
    programs = programs_of(schedule, costs.sends == "paired")
    rank = schedule.graph.rank.tolist()
    starts, ends = np.zeros(len(durations)), np.zeros(len(durations))
    clock, position = [0.0] * schedule.ranks, [0] * schedule.ranks
    posted: dict[tuple[int, Message], float] = {}
    ready = list(range(schedule.ranks))[::-1]
    while ready:
        current = ready.pop()
        while position[current] < len(programs[current]):
            step = programs[current][position[current]]
            if isinstance(step, int):
                starts[step] = clock[current]
                clock[current] = ends[step] = clock[current] + durations[step]
                position[current] += 1
                continue
            arrival = clock[current]
            complete = True
            for message in step:
                ours, theirs = (current, message), (_other(rank, message, current), message)
                if ours not in posted:
                    posted[ours] = clock[current]
                    ready.append(theirs[0])
                if theirs not in posted:
                    complete = False
                    continue
                delay = costs.delay(rank[message.producer], rank[message.consumer])
                arrival = max(arrival, max(posted[ours], posted[theirs]) + delay)
            if not complete:
                break
            clock[current] = arrival
            position[current] += 1
    if any(position[number] < len(programs[number]) for number in range(schedule.ranks)):
        raise LabError(_deadlock(schedule, programs, position, posted))
    return Timeline(schedule, starts, ends, costs=costs)


def _other(rank: list[int], message: Message, current: int) -> int:
    producer, consumer = rank[message.producer], rank[message.consumer]
    return consumer if current == producer else producer


def _deadlock(
    schedule: Schedule, programs: list[list[Step]], position: list[int], posted: dict[tuple[int, Message], float]
) -> str:
    rank, actions = schedule.graph.rank.tolist(), schedule.actions
    current = next(number for number, at in enumerate(position) if at < len(programs[number]))
    blocked_on: dict[int, Message] = {}
    while current not in blocked_on:
        step = programs[current][position[current]]
        messages = step if isinstance(step, tuple) else ()
        message = next(one for one in messages if (_other(rank, one, current), one) not in posted)
        blocked_on[current] = message
        current = _other(rank, message, current)
    cycle = list(blocked_on)[list(blocked_on).index(current) :]
    parts_en, parts_fr = [], []
    for number in cycle:
        message = blocked_on[number]
        other = _other(rank, message, number)
        made, needed = actions[message.producer], actions[message.consumer]
        if rank[message.producer] == number:
            parts_en.append(f"rank {number} sends the output of {made} to rank {other}")
            parts_fr.append(f"le rang {number} envoie le résultat de {made} au rang {other}")
        else:
            parts_en.append(f"rank {number} waits to receive what {needed} needs from rank {other}")
            parts_fr.append(f"le rang {number} attend du rang {other} ce qu’il faut à {needed}")
    return say(
        en=f"deadlock of blocking sends: {'; '.join(parts_en)}, and none of them receives. Post sends and receives "
        "together (sends='paired') or do not block (sends='buffered').",
        fr=f"interblocage d’envois bloquants : {' ; '.join(parts_fr)}, et aucun ne reçoit. Postez envois et réceptions "
        "ensemble (sends='paired') ou n’attendez pas (sends='buffered').",
    )
