"""How well the labs' checks judge: right variants accepted, wrong ones refused, and their mistakes named.

    python benchmarks/checks.py            # all labs: some minutes
    python benchmarks/checks.py --lab 03

The variants are those of the banks in `tests/labs/test_wrong_answers*.py`. A right one is an answer of the bank, or it
holds its numbers in another type or container, where this changes what it returns. A wrong one is named if
its verdict holds the words that the bank gives, and is none of the kit's sentences that only state a difference.

Exit status 1 below the goals: every right one accepted, every wrong one refused, 90 % of these named, and for each
exercise at least 2 right and 6 wrong ones that its judge can tell apart.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import reduce
from pathlib import Path

import tyro

from dlojz.base.language import use_language
from dlojz.labs.kit.exercise import Challenge

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.labs.bank import BankTests, Counts  # noqa: E402 - the tests are no installed package

RIGHT_LEAST, WRONG_LEAST, NAMED_LEAST = 2, 6, 0.9
HEAD = ("lab", "exercises", "right", "accepted", "wrong", "refused", "named")


def banks() -> Iterator[type[BankTests]]:
    """Every class of tests that holds a bank."""
    for path in sorted((ROOT / "tests" / "labs").glob("test_*.py")):
        if "BankTests" in path.read_text(encoding="utf-8"):
            module = importlib.import_module(f"tests.labs.{path.stem}")
            for found in vars(module).values():
                if isinstance(found, type) and issubclass(found, BankTests) and found is not BankTests:
                    yield found


def labs() -> dict[str, list[str]]:
    """The exercises of every lab, by its number, without challenges, whose answers are not right or wrong."""
    import dlojz.labs

    found = {}
    for module in pkgutil.iter_modules(dlojz.labs.__path__):
        if number := re.match(r"lab(\d+)_", module.name):
            exercises = importlib.import_module(f"dlojz.labs.{module.name}").EXERCISES
            found[number[1]] = [one.id for one in exercises if not isinstance(one, Challenge)]
    return found


def short_of(bank: type[BankTests], exercise_id: str) -> list[str]:
    """What a bank lacks for an exercise."""
    right, wrong = len(bank.rights(exercise_id)), len(bank.wrong[exercise_id])
    lacks = [(right, RIGHT_LEAST, "right"), (wrong, WRONG_LEAST, "wrong")]
    return [f"{exercise_id}: {many} {kind} variants, not {least}" for many, least, kind in lacks if many < least]


def row(lab: str, counts: Counts) -> str:
    """One line of the table."""
    named = f"{counts.named / counts.wrong:.0%}" if counts.wrong else "—"
    cells = (lab, *map(str, counts[:5]), named)
    return "  ".join(f"{cell:>{max(len(name), 5)}}" for name, cell in zip(HEAD, cells, strict=True))


def main(lab: str | None = None, every: bool = False) -> int:
    """Judge the variants.

    Args:
        lab: one lab alone, by its number, e.g. 03.
        every: also list wrong answers that are refused, but not named.
    """
    use_language("en")
    holders = {exercise_id: bank for bank in banks() for exercise_id in bank.exercises}
    chosen = {number: ids for number, ids in labs().items() if lab is None or number == lab.zfill(2)}
    if not chosen:
        print(f"There is no lab {lab}: give one of {', '.join(labs())}.", file=sys.stderr)
        return 2
    print("  ".join(f"{name:>5}" for name in HEAD))
    amiss: dict[str, list[str]] = defaultdict(list)
    totals = []
    for number, exercise_ids in chosen.items():
        counts = Counts()
        for exercise_id in exercise_ids:
            if exercise_id not in holders:
                amiss[number].append(f"{exercise_id}: in no bank")
                continue
            one = holders[exercise_id].counted(exercise_id)
            counts = counts.plus(one)
            amiss[number] += [*one.amiss, *short_of(holders[exercise_id], exercise_id)]
            if every:
                amiss[number] += [f"(not named) {line}" for line in one.unnamed]
        totals.append(counts)
        print(row(number, counts), flush=True)
    total = reduce(Counts.plus, totals)
    print(row("all", total))
    for number, lines in amiss.items():
        for line in lines:
            print(f"{number}  {line}")
    short = any(not line.startswith("(not named)") for lines in amiss.values() for line in lines)
    return int(short or total.named < NAMED_LEAST * total.wrong)


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
