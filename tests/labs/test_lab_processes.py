"""The number of processes in the contents is what the lab's checks, its `%%ranks` cells and its runs ask for."""

import ast
import re
from pathlib import Path

import pytest

from dlojz.labs.kit.contents import entry_of
from dlojz.labs.kit.lab import NUMBERS, content_of
from dlojz.labs.kit.source import Code, read_source
from dlojz.ranks.rank_setup import MOST_PROCESSES

ROOT = Path(__file__).resolve().parents[2]
DEGREES = ("dp", "pp", "tp")
RANKS = re.compile(r"^(?:# )?%%ranks (\d+)", re.MULTILINE)
Degrees = dict[str, int]


def ranks_of_checks(number: str) -> dict[str, set[int]]:
    """Exercise → the numbers of ranks that its answer is run on."""
    return {
        exercise.id: {size for size, _ in exercise.judge.cases}
        for exercise in content_of(number).EXERCISES
        if getattr(exercise.judge, "on_ranks", False)
    }


class Runs(ast.NodeVisitor):
    """What the runs of a lab's code take, as far as they are written out: dp × pp × tp."""

    def __init__(self) -> None:
        self.known: dict[str, Degrees] = {}
        self.sizes: set[int] = set()

    def visit_Assign(self, node: ast.Assign) -> None:
        degrees = self.degrees(node.value)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.known[target.id] = degrees
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        given = {one.arg: one.value for one in node.keywords}
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in ("run", "train") and "on" not in given:
            size = 1
            for degree in self.degrees(node).values():
                size *= degree
            self.sizes.add(size)
        if called == "spmd" and isinstance(node.args[1], ast.Constant) and isinstance(node.args[1].value, int):
            self.sizes.add(node.args[1].value)
        if isinstance(ranks := given.get("ranks"), ast.Constant) and isinstance(ranks.value, int):
            self.sizes.add(ranks.value)
        self.generic_visit(node)

    def degrees(self, node: ast.expr) -> Degrees:
        """Those of a configuration, a layout or a run; what changes another begins with that one's."""
        if isinstance(node, ast.Attribute):
            return self.degrees(node.value)
        if isinstance(node, ast.Name):
            return self.known.get(node.id, {})
        if not isinstance(node, ast.Call):
            return {}
        given = {one.arg: one.value for one in node.keywords}
        base = given.get("layout", node.args[0] if node.args else None)
        own = {
            name: value.value
            for name in DEGREES
            if isinstance(value := given.get(name), ast.Constant) and isinstance(value.value, int)
        }
        return {**(self.degrees(base) if base is not None else {}), **own}


def ranks_of_cells(number: str) -> set[int]:
    """The numbers of ranks that the cells of a lab ask for."""
    cells = read_source(ROOT / "solutions" / f"{entry_of(number).file}.py").cells
    runs = Runs()
    asked = set()
    for cell in cells:
        if isinstance(cell, Code):
            asked |= {int(size) for size in RANKS.findall(cell.text)}
            plain = "\n".join("" if line.startswith("%") else line for line in cell.text.splitlines())
            runs.visit(ast.parse(plain))
    return asked | runs.sizes


@pytest.mark.parametrize("number", NUMBERS)
def test_the_contents_say_how_many_ranks_a_lab_takes(number: str) -> None:
    checks = ranks_of_checks(number)
    assert all(checks.values()), "a check on ranks whose numbers of ranks are not found"
    sizes = {1} | ranks_of_cells(number) | {size for found in checks.values() for size in found}
    sizes = {size for size in sizes if size <= MOST_PROCESSES}  # more are threads of one process
    assert entry_of(number).processes == max(sizes)


def test_sizes_of_runs_are_read_as_they_are_written() -> None:
    runs = Runs()
    runs.visit(
        ast.parse(
            "layout = dlojz.Layout(dp=2, pp=2, tp=2)\n"
            "config = dlojz.RunConfig(layout=layout)\n"
            "many = dlojz.RunConfig.of(dp=64)\n"
            "plain = dlojz.run(config, tp=1)\n"
            "later = dlojz.run(plain.config, dp=1)\n"
            "far = dlojz.run(many, on='slurm')\n"
            "here = plan_here('coatnet_tiny', ranks=3)\n"
            "forked = spmd(here, 5, limit_s=60)\n"
        )
    )
    assert runs.sizes == {4, 2, 3, 5}
