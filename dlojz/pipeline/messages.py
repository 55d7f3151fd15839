"""List the messages between the stages of a schedule: what each rank sends, in which order, and where each is taken.

A forward of stage s sends its output to stage s + 1, a backward (or a backward for the input) the gradient of its input
to stage s − 1. The lab's runtime sends by these lists, and the forecast of its memory counts by them.
"""

from __future__ import annotations

from typing import NamedTuple

from dlojz.pipeline.schedule import BACKWARD, BACKWARD_INPUT, FORWARD, Action, Schedule

SENDING = (FORWARD, BACKWARD, BACKWARD_INPUT)
"""Kinds of actions that take a message and send one."""


class StageMessage(NamedTuple):
    """Message to a stage: the input of a forward, or the output's gradient of a backward."""

    forward: bool
    pipe: int
    stage: int
    micro_batch: int


def message_for(action: Action) -> StageMessage:
    """Return the message that an action takes."""
    return StageMessage(action.kind == FORWARD, action.pipe, action.stage, action.micro_batch)


def message_after(action: Action) -> StageMessage:
    """Return the message that an action sends: a forward to the stage behind, a backward to the stage before."""
    forward = action.kind == FORWARD
    return StageMessage(forward, action.pipe, action.stage + (1 if forward else -1), action.micro_batch)


def messages_of(schedule: Schedule, rank: int) -> list[tuple[int, StageMessage]]:
    """List all that a rank sends in a step, in order: (receiver, message)."""
    sent = []
    for action in schedule.orders[rank]:
        for element in action.elements:
            message = message_after(element)
            if element.kind in SENDING and 0 <= message.stage < schedule.stages:
                sent.append((schedule.placement[element.pipe][message.stage], message))
    return sent


def places_of_messages(schedule: Schedule) -> tuple[dict[StageMessage, int], dict[StageMessage, int]]:
    """Number the action in its sender's, and in its receiver's order, at which each message is sent and taken."""
    sent_at: dict[StageMessage, int] = {}
    taken_at: dict[StageMessage, int] = {}
    for order in schedule.orders:
        elements = (element for each in order for element in each.elements)
        for place, action in enumerate(elements):
            if action.kind in SENDING:
                sent_at[message_after(action)] = place
                taken_at[message_for(action)] = place
    return sent_at, taken_at
