"""Schedules as torch's pipeline runtime writes them: one row per rank, one cell per action, and back again.

Layer 2. Invariant: `from_csv(to_csv(schedule))` has the same orders and the same placement; what comes from a file is
read letter by letter, checked whole, and refused in one sentence.

Source of the format: `torch.distributed.pipelining.schedules` (2.13), `_dump_csv` and `_load_csv`, "compute_only":
cells such as `2F0`, `3I1`, `0W2`, `(1F1;1B0)OVERLAP_F_B`; an empty cell is a deliberate pause, which torch drops.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from dlojz.pipeline.action import COMPUTES, OVERLAPPED, UPDATE, Action, parse_action
from dlojz.pipeline.schedule import Schedule
from dlojz.pipeline.timeline import Timeline
from dlojz.pipeline.validity import check
from dlojz.schema import LabError
from dlojz.text import say

MAX_CHARACTERS = 4 * 1024 * 1024
MAX_RANKS = 1024
MAX_ACTIONS = 200_000
MAX_CELL = 64
_DERIVED = re.compile(r"\d{1,9}(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d{0,9}")
"""Cells that torch's own dump adds; they follow from the computations, so they are read over."""


def to_csv(schedule: Schedule, timeline: Timeline | None = None) -> str:
    """A schedule as text, one row per rank.

    Args:
        schedule: any; whether torch can execute it is told by `torch_refusal`.
        timeline: if given, empty cells stand where a rank idles, one for each unit of the shortest action.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for rank, order in enumerate(schedule.orders):
        writer.writerow(map(str, order) if timeline is None else _with_pauses(timeline, rank))
    return text.getvalue()


def write_csv(schedule: Schedule, path: str | Path) -> Path:
    """Write `to_csv` to a file.

    Raises:
        LabError: if the file cannot be written.
    """
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(to_csv(schedule), encoding="utf-8")
    except OSError as error:
        raise LabError(
            say(
                en=f"the schedule cannot be written to {target}: {error.strerror}; give another path.",
                fr=f"l’ordonnancement ne peut pas être écrit dans {target} : {error.strerror} ; donnez un autre "
                "chemin.",
            )
        ) from None
    return target


def _with_pauses(timeline: Timeline, rank: int) -> Iterator[str]:
    positive = timeline.durations[timeline.durations > 0]
    quantum = float(positive.min()) if positive.size else 1.0
    free = timeline.start
    part = timeline.of_rank(rank)
    for number in range(part.start, part.stop):
        pauses = int((float(timeline.starts[number]) - free) / quantum + 1e-6)
        yield from [""] * min(pauses, MAX_ACTIONS)
        yield str(timeline.schedule.actions[number])
        free = float(timeline.ends[number])


def from_csv(text: str, name: str = "custom") -> Schedule:
    """Read a schedule; which rank holds which stage is seen from where the stage's actions stand.

    Args:
        text: rows and cells as `to_csv` writes them; empty cells and torch's communication cells are read over.
        name: name of the schedule.

    Returns:
        A schedule that can be executed: `validity.check` has passed it.

    Raises:
        LabError: for a cell that is no action (with its row and column), a stage on two ranks, a stage or a micro-batch
            left out, an empty or a too big text, or an order that cannot be executed.
    """
    schedule = read_csv(text, name)
    check(schedule)
    return schedule


def read_csv(text: str, name: str = "custom") -> Schedule:
    """As `from_csv`, but the order is not checked: for an editor, which shows `validity.problems` beside it.

    Raises:
        LabError: as `from_csv`, but not for the order.
    """
    if len(text) > MAX_CHARACTERS:
        raise LabError(
            say(
                en=f"the CSV has {len(text)} characters, more than the {MAX_CHARACTERS} that are read: give a schedule "
                "of fewer micro-batches.",
                fr=f"le CSV compte {len(text)} caractères, plus que les {MAX_CHARACTERS} qui sont lus : donnez un "
                "ordonnancement de moins de micro-batches.",
            )
        )
    orders = list(_orders(text))
    while orders and not orders[-1]:  # blank lines at the end of a file are no ranks
        orders.pop()
    if not orders:
        raise LabError(
            say(
                en="the CSV holds no action: write one row per rank, with cells such as 0F0 and 0B0.",
                fr="le CSV ne contient aucune action : écrivez une ligne par rang, avec des cases comme 0F0 et 0B0.",
            )
        )
    for rank, order in enumerate(orders):
        if not order:
            raise LabError(
                say(
                    en=f"row {rank + 1} of the CSV holds no action: each rank holds at least one stage, remove the row "
                    "or fill it.",
                    fr=f"la ligne {rank + 1} du CSV ne contient aucune action : chaque rang porte au moins un étage, "
                    "retirez la ligne ou remplissez-la.",
                )
            )
    placement = _placement(orders)
    elements = [element for order in orders for action in order for element in action.elements]
    return Schedule.of(
        name,
        orders,
        placement,
        _without_gap({e.micro_batch for e in elements}, "micro-batch", "micro-batch"),
        token_slices=_without_gap({e.token_slice for e in elements}, "token slice", "tranche de tokens"),
        barrier=not any(e.kind == UPDATE for e in elements),
        asynchronous=any(e.kind == UPDATE for e in elements),
    )


def load_csv(path: str | Path) -> Schedule:
    """`from_csv` of a file; its name is the schedule's.

    Raises:
        LabError: as `from_csv`, and if the file cannot be read as text.
    """
    target = Path(path)
    try:
        with target.open("rb") as file:
            text = file.read(4 * MAX_CHARACTERS + 1).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or say(en="it is no UTF-8 text", fr="ce n’est pas du texte UTF-8")
        raise LabError(
            say(
                en=f"the schedule {str(target)!r} cannot be read: {why}; give a CSV file with one row per rank.",
                fr=f"l’ordonnancement {str(target)!r} ne peut pas être lu : {why} ; donnez un fichier CSV d’une ligne "
                "par rang.",
            )
        ) from None
    return from_csv(text, target.stem or "custom")


def torch_refusal(schedule: Schedule) -> str | None:
    """Why torch's pipeline runtime cannot execute a schedule, in one sentence; None where it can."""
    kinds = {element.kind for action in schedule.actions for element in action.elements}
    if schedule.pipes > 1:
        return say(
            en="torch keeps each stage on one rank, and a bidirectional schedule has it on two: use the teaching "
            "runtime, or a V placement (dualpipev, zbv).",
            fr="torch garde chaque étage sur un seul rang, et un ordonnancement bidirectionnel l’a sur deux : prenez "
            "l’exécution pédagogique, ou un placement en V (dualpipev, zbv).",
        )
    if schedule.token_slices > 1:
        return say(
            en="torch cuts a batch into micro-batches, not a sequence into token slices: use 1 slice.",
            fr="torch coupe un batch en micro-batches, pas une séquence en tranches de tokens : prenez 1 tranche.",
        )
    if schedule.asynchronous or UPDATE in kinds:
        return say(
            en="torch updates the weights after all micro-batches, and this schedule does so between them: use the "
            "teaching runtime.",
            fr="torch met les poids à jour après tous les micro-batches, et cet ordonnancement le fait entre eux : "
            "prenez l’exécution pédagogique.",
        )
    if not kinds <= set(COMPUTES) | {OVERLAPPED}:
        return say(
            en="torch has no action that sends activations away and fetches them back: remove E and L (bpipe becomes "
            "1f1b).",
            fr="torch n’a pas d’action qui envoie des activations ailleurs et les rapporte : retirez E et L (bpipe "
            "devient 1f1b).",
        )
    return None


def _orders(text: str) -> Iterator[list[Action]]:
    total = 0
    try:
        for row, cells in enumerate(csv.reader(io.StringIO(text)), start=1):
            if row > MAX_RANKS:
                raise LabError(_too_many(say(en="rows", fr="lignes"), MAX_RANKS))
            order = [action for column, cell in enumerate(cells, start=1) if (action := _cell(cell, row, column))]
            total += len(order)
            if total > MAX_ACTIONS:
                raise LabError(_too_many("actions", MAX_ACTIONS))
            yield order
    except csv.Error as error:
        raise LabError(
            say(
                en=f"the text is no CSV ({error}): write one row per rank, cells separated by commas.",
                fr=f"le texte n’est pas un CSV ({error}) : écrivez une ligne par rang, les cases séparées par des "
                "virgules.",
            )
        ) from None


def _cell(cell: str, row: int, column: int) -> Action | None:
    """The action of a cell; None for a pause, or for a communication, which follows from the computations."""
    cell = cell.strip()
    if not cell or _DERIVED.fullmatch(cell):
        return None
    try:
        if len(cell) > MAX_CELL or not cell.isascii():
            cell = cell[:MAX_CELL].encode("ascii", "backslashreplace").decode()
            return parse_action("…" + cell)  # which refuses it
        action = parse_action(cell)
    except LabError as error:
        raise LabError(
            say(en=f"row {row}, column {column}: {error}", fr=f"ligne {row}, colonne {column} : {error}")
        ) from None
    return action


def _too_many(what: str, most: int) -> str:
    return say(
        en=f"the CSV has more than {most} {what}, which is no schedule to be read here: give a smaller one.",
        fr=f"le CSV a plus de {most} {what}, ce n’est pas un ordonnancement à lire ici : donnez-en un plus petit.",
    )


def _placement(orders: list[list[Action]]) -> list[list[int]]:
    """Rank of each stage, per pipe."""
    held: dict[tuple[int, int], int] = {}
    for rank, order in enumerate(orders):
        for element in (element for action in order for element in action.elements):
            first = held.setdefault((element.pipe, element.stage), rank)
            if first != rank:
                raise LabError(
                    say(
                        en=f"stage {element.stage} is on rank {first} and, by {element}, on rank {rank}: a stage lives "
                        "on one rank, keep all its actions in one row (a second pipe is written u in front).",
                        fr=f"l’étage {element.stage} est sur le rang {first} et, par {element}, sur le rang {rank} : "
                        "un étage vit sur un seul rang, gardez ses actions sur une ligne (un second pipeline s’écrit "
                        "avec u devant).",
                    )
                )
    stages = _without_gap({stage for _, stage in held}, "stage", "étage")
    pipes = 1 + max(pipe for pipe, _ in held)
    for pipe in range(pipes):
        for stage in range(stages):
            if (pipe, stage) not in held:
                raise LabError(_left_out("stage", "étage", f"{'u' if pipe else ''}{stage}"))
    return [[held[pipe, stage] for stage in range(stages)] for pipe in range(pipes)]


def _without_gap(numbers: Iterable[int], what_en: str, what_fr: str) -> int:
    """How many there are, once it is sure that they are 0, 1, 2 … without a gap."""
    present = set(numbers)
    for number in range(len(present)):
        if number not in present:
            raise LabError(_left_out(what_en, what_fr, str(number)))
    return len(present)


def _left_out(what_en: str, what_fr: str, number: str) -> str:
    return say(
        en=f"the CSV has no action of {what_en} {number}, but of later ones: number them 0, 1, 2 … without a gap.",
        fr=f"le CSV n’a aucune action pour : {what_fr} {number}, mais en a pour les suivants : numérotez 0, 1, 2 … "
        "sans trou.",
    )
