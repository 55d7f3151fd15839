"""Which small wrong changes the tests see: mutation testing, with changes chosen by rule.

    python benchmarks/mutants.py --resume mutants.json
    python benchmarks/mutants.py --room pipeline --most 40

A mutant is the package with one small wrong change: `<` for `<=`, `max` for `min`, a term of a sum left out, a missing
all-reduce, 1000 for 1024, a bit left out of a mask, one micro-batch for all, `dp` for the world's size (all in
`KINDS`). Of each room they are drawn kind after kind, by a hash of the function's
name, the kind, and the line before and after: code that moves or changes elsewhere leaves the sample as it is.

Each is made in a temporary copy of the tree, never in the checkout. The tests are those of `make test`; with
DLOJZ_NIGHTLY=1 those of the night run too. Test files run in this order: those that import or
name the changed module, those of the room that import another one of its folder, the rest of the room, and those
outside that know the module, where they are few. Each file runs once without a mutant, with a probe at each changed
statement; of each, only the tests that reach the statement run, the fastest first, until one fails. A mutant is killed
when that test is green without it. What survives is a test to write, or code without effect: read it before you write.

Left out are docstrings, annotations, messages (`say`, `print`, logs), `__repr__`, drawing, decorators, times to wait,
and changes that mean the same by rule (see `_means_the_same`).

Exit code 1 if fewer than 95 % are killed. With `--resume`, results are kept as they come, and a second call goes on:
what was killed stays so, what survived runs again once tests of the room have changed.

Source: DeMillo, Lipton and Sayward 1978, "Hints on test data selection", IEEE Computer 11(4); Just et al. 2014, "Are
mutants a valid substitute for real faults in software testing?", FSE.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tyro
from rich.console import Console
from rich.table import Table

from dlojz.prediction.trace_store import SOURCES as TRACED_BY

ROOT = Path(__file__).resolve().parents[1]
GOAL = 0.95
LONGEST_S = 1500.0
"""How long a test file may take without a mutant."""
FEW = 6
"""What more test files outside its room import is a word that everybody uses, and none of them is about it."""
SLOW = tuple(
    f"tests/{name}/" for name in ("browser", "campaign", "cluster", "faults", "libraries", "notebooks", "train")
)
"""Tests outside a room that are not run, though they import a changed module: trainings, notebooks, a network."""

Room = Literal[
    "prediction", "cost_model", "pipeline", "by_hand", "config", "running", "labs/kit", "base", "results", "planner",
    "libraries", "campaign", "display", "labs", "cli",
]  # fmt: skip
ROOMS: tuple[Room, ...] = get_args(Room)
Kind = Literal[
    "sign", "factor", "off by one", "edge", "max for min", "any for all", "unit", "dropped term", "missing call",
    "error swallowed", "dropped branch", "and for or", "lost accumulation", "true for false", "bits", "loop",
    "part for whole",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Mutant:
    """One wrong change: `start` to `end` (bytes of the file) become `text`; `key` is its name among the results."""

    room: Room
    path: str
    line: int
    function: str
    kind: Kind
    start: int
    end: int
    text: str
    old: str
    new: str
    key: str

    def changed(self) -> bytes:
        """The module with this change."""
        source = (ROOT / self.path).read_bytes()
        return source[: self.start] + self.text.encode() + source[self.end :]


# -- the rules

_MESSAGES = re.compile(r"^(say|print|one_of|warn|tell|told|debug|info|warning|error|exception|log|_said|Said)$")
_SHOWN = re.compile(r"^(__repr__|__str__|__format__|_repr_\w+_|_?draw\w*|_?plot\w*|\w*html\w*|\w*svg\w*)$")
_DRAWN_MODULES = re.compile(r"(figures?|shown|_page|_pages|text_table|words|style)\.py$")
_WAITING = re.compile(
    r"timeout|sleep|poll|patience|interval|wait_s|limit_s|wall_s|maxsize|indent|width|digits|repeats|warmup"
    r"|^_?max_|most_|diverged",
    re.IGNORECASE,
)
_PATHS = re.compile(r"(?i:folder|path|root|home|directory)|\b(out|target|here) /")
_CALLS = re.compile(
    r"^(all_reduce|all_gather\w*|reduce_scatter\w*|broadcast\w*|reduce|all_to_all\w*|barrier|wait|synchronize|isend"
    r"|irecv|send|recv|kill|killpg|unlink|zero_|zero_grad|add_|copy_|mul_|div_|step)$"
)
_SWAPPED = {
    "max": "min", "min": "max", "maximum": "minimum", "minimum": "maximum", "amax": "amin", "amin": "amax",
    "argmax": "argmin", "argmin": "argmax", "ceil": "floor", "floor": "ceil", "MAX": "MIN", "MIN": "MAX",
}  # fmt: skip
_EDGES: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in",
    ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
_PARTS = {
    "world_size": ("dp",), "dp": ("world_size",), "tp": ("pp",), "pp": ("tp",), "cp": ("tp",), "ep": ("dp",),
    "ranks": ("processes",), "micro_batches": ("micro_batch",), "micro_batch": ("micro_batches",),
}  # fmt: skip
"""Numbers of ranks or of samples that are easily taken for one another."""
_UNITS = {1024: "1000", 1000: "1024", 2**20: "10**6", 10**6: "2**20", 10**9: "2**30", 2**30: "10**9"}


class _Rules(ast.NodeVisitor):
    """All changes that the rules make in one module."""

    def __init__(self, room: Room, path: str) -> None:
        self._room, self._path, self._source = room, path, (ROOT / path).read_bytes()
        self._lines = self._source.split(b"\n")
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line) + 1)
        self._function: list[str] = []
        self.found: list[Mutant] = []
        tree = ast.parse(self._source)
        self._known = {one.id for one in ast.walk(tree) if isinstance(one, ast.Name)}
        self.visit(tree)

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr | ast.stmt) -> str:
        start, end = self._span(node)
        return self._source[start:end].decode()

    def _replace(self, kind: Kind, node: ast.expr | ast.stmt, text: str) -> None:
        self._between(kind, node, *self._span(node), text)

    def _operator(self, kind: Kind, whole: ast.expr, left: ast.expr, right: ast.expr, text: str) -> None:
        """Another operator between two operands, which may stand in parentheses."""
        start, end = self._span(left)[1], self._span(right)[0]
        between = self._source[start:end].decode()
        self._between(kind, whole, start, end, re.sub(r"^(\)*\s*).*?(\s*\(*)$", rf"\g<1>{text}\g<2>", between))

    def _between(self, kind: Kind, node: ast.expr | ast.stmt, start: int, end: int, text: str) -> None:
        changed = self._source[:start] + text.encode() + self._source[end:]
        first, last = node.lineno - 1, bisect_left(self._starts, end) - 1
        stop = self._starts[last + 1] - 1 + len(changed) - len(self._source)
        old, new = (
            b" ".join(line.strip() for line in lines).decode()
            for lines in (self._lines[first : last + 1], changed[self._starts[first] : stop].split(b"\n"))
        )
        function = ".".join(self._function) or "module"
        said = re.sub(r"\s", "", f"{function}|{kind}|{old}|{new}")
        key = hashlib.sha256(said.encode()).hexdigest()[:16]
        self.found.append(Mutant(self._room, self._path, node.lineno, function, kind, start, end, text, old, new, key))

    # what is left out

    def visit(self, node: ast.AST) -> None:
        """What is told to the type checker, texts and imports stay."""
        if not isinstance(node, ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
            super().visit(node)

    def _visit_named(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        """Annotations and decorators are no code of the function, or of the class."""
        if _SHOWN.match(node.name) or any("overload" in ast.dump(one) for one in node.decorator_list):
            return
        defaults = [] if isinstance(node, ast.ClassDef) else [*node.args.defaults, *filter(None, node.args.kw_defaults)]
        self._function.append(node.name)
        for part in (*defaults, *node.body):
            self.visit(part)
        self._function.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _visit_named  # noqa: N815 - names of ast

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Only the value."""
        if node.value:
            self.visit_Assign(ast.Assign([node.target], node.value))

    def visit_Assign(self, node: ast.Assign) -> None:
        """Times to wait, and what is a list of names or a text, stay."""
        names = " ".join(ast.unparse(target) for target in node.targets)
        lists = isinstance(node.value, ast.Tuple | ast.List) and names.isupper()  # sizes that are measured, say
        if not _WAITING.search(names.lower()) and "__all__" not in names and not lists:
            self.visit(node.value)

    def visit_keyword(self, node: ast.keyword) -> None:
        """Arguments that say how long to wait stay."""
        if not (node.arg and _WAITING.search(node.arg)):
            self.visit(node.value)

    # what is changed

    def visit_Raise(self, node: ast.Raise) -> None:
        """A refusal, or an error that goes on up."""
        self._replace("error swallowed", node, "pass")

    def visit_Expr(self, node: ast.Expr) -> None:
        """A statement that is a call."""
        if isinstance(node.value, ast.Constant):
            return
        if any(_CALLS.match(name) for name in _called(node.value)):
            self._replace("missing call", node, "pass")
        self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        """max, any; the arguments of all that is no message."""
        name = _name(node.func)
        if _MESSAGES.match(name) or (name == "join" and ast.unparse(node.func).startswith(("'", '"'))):
            return
        end = self._span(node.func)[1]
        several = len(node.args) > 1 or name not in ("max", "min") or isinstance(node.func, ast.Attribute)
        if name in _SWAPPED and (several or not any(key.arg == "default" for key in node.keywords)):
            self._between("max for min", node, end - len(name), end, _SWAPPED[name])
        if isinstance(node.func, ast.Name) and name in ("any", "all"):
            self._replace("any for all", node.func, "all" if name == "any" else "any")
        if not re.search("sleep|lru_cache|field$|Field$|compile$|^randn?$", name):
            self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        """A loop that ends after its first round, or is run in none."""
        if isinstance(node.iter, ast.Call) and _name(node.iter.func) == "range" and len(node.iter.args) == 1:
            self._replace("loop", node.iter.args[0], f"min(1, {self._text(node.iter.args[0])})")
        self._replace("loop", node.iter, "()")
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        """The ranks of an axis for all ranks, and the other way round."""
        for other in _PARTS.get(node.id, ()) if isinstance(node.ctx, ast.Load) and node.id in self._known else ():
            if other in self._known:
                self._replace("part for whole", node, other)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """ReduceOp.MAX; `layout.dp` for `layout.world_size`."""
        if isinstance(node.ctx, ast.Load) and _name(node.value) in ("layout", "layouts", "own", "its"):
            end = self._span(node)[1]
            for other in _PARTS.get(node.attr, ()):
                self._between("part for whole", node, end - len(node.attr), end, other)
        if node.attr in ("MAX", "MIN"):
            end = self._span(node)[1]
            self._between("max for min", node, end - 3, end, _SWAPPED[node.attr])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Signs, terms, factors."""
        whole, left, right = self._text(node), self._text(node.left), self._text(node.right)
        plain = not _is_text(node) and not _has_tiny(node)
        match node.op:
            case ast.Add() | ast.Sub() if plain:
                adds = isinstance(node.op, ast.Add)
                self._operator("sign", node, node.left, node.right, "-" if adds else "+")
                self._replace("dropped term", node, left)
                if adds:
                    self._replace("dropped term", node, right)
            case ast.Mult() | ast.Div() if plain and not (isinstance(node.op, ast.Div) and _PATHS.search(whole)):
                operator = "*" if isinstance(node.op, ast.Mult) else "/"
                self._replace("factor", node, f"(2 * ({left}) {operator} ({right}))")
                self._replace("factor", node, f"({left})")
                if isinstance(node.op, ast.Mult):
                    self._replace("factor", node, f"({right})")
            case ast.BitAnd() | ast.BitOr() if _is_mask(node):
                self._replace("bits", node, f"({left})")
                self._replace("bits", node, f"({right})")
            case ast.FloorDiv():
                self._replace("off by one", node, f"({whole} + 1)")
            case ast.Pow() if whole in ("2**20", "10**9", "2**30", "10**6", "2**10", "10**3"):
                self._replace("unit", node, _UNITS[eval(whole)])
                return
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """-(-a // b) rounds up; `not`."""
        inner = node.operand
        if isinstance(node.op, ast.USub) and isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.FloorDiv):
            if isinstance(inner.left, ast.UnaryOp):
                text = f"({self._text(inner.left.operand)} // {self._text(inner.right)})"
                self._replace("off by one", node, text)
            return
        if isinstance(node.op, ast.Not):
            self._replace("dropped branch", node, f"({self._text(inner)})")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Edges; `==` and `in` the other way round."""
        tiny = _has_tiny(node)
        for left, operator, right in zip((node.left, *node.comparators), node.ops, node.comparators, strict=False):
            if not (tiny and isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE)):
                self._operator("edge", node, left, right, _EDGES[type(operator)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """`and` for `or`, where both sides are conditions."""
        conditions = all(isinstance(value, ast.Compare | ast.BoolOp | ast.UnaryOp) for value in node.values)
        if conditions and len(node.values) == 2:
            self._operator("and for or", node, *node.values, "or" if isinstance(node.op, ast.And) else "and")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        """A branch that is never taken."""
        name = ast.unparse(node.test)
        if name == "TYPE_CHECKING" or "__name__" in name or _prints(node.body):
            return
        if not _keeps_the_best(node):
            self.visit(node.test)
        self._replace("dropped branch", node.test, "False")
        for statement in (*node.body, *node.orelse):
            self.visit(statement)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """One of the two values only."""
        if not (_is_text(node.body) or _is_text(node.orelse)):
            self._replace("dropped branch", node, f"({self._text(node.body)})")
            self._replace("dropped branch", node, f"({self._text(node.orelse)})")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """A sum of which only the last term is kept, or one with the wrong sign."""
        if not _is_text(node.value):
            start, end = self._span(node.target)[1], self._span(node.value)[0]
            self._between("lost accumulation", node, start, end, " = ")
            signs = {ast.Add: " -= ", ast.Sub: " += ", ast.Mult: " += ", ast.Div: " *= "}
            if sign := signs.get(type(node.op)):
                self._between("sign", node, start, end, sign)
        self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Whole numbers, units, yes and no."""
        value = node.value
        if value is True or value is False:
            self._replace("true for false", node, str(not value))
        elif isinstance(value, int | float) and value in _UNITS and self._text(node).replace("_", "").isalnum():
            self._replace("unit", node, _UNITS[int(value)])
        elif isinstance(value, int) and self._text(node).startswith(("0o", "0b", "0x")):
            for bit in (1 << place for place in range(value.bit_length()) if value >> place & 1):
                self._replace("bits", node, hex(value & ~bit))
        elif isinstance(value, int) and 0 <= value < 64:
            self._replace("off by one", node, str(value + 1))


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _called(node: ast.expr) -> list[str]:
    """Names of what is called, also in `unwatched(dist.all_reduce)(x)` and `send(x).wait()`."""
    names = []
    while isinstance(node, ast.Call):
        names += [_name(node.func), *(map(_name, node.func.args) if isinstance(node.func, ast.Call) else ())]
        node = node.func.value if isinstance(node.func, ast.Attribute) else node.func
    return names


_COLLECTIONS = (ast.JoinedStr, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.ListComp, ast.SetComp, ast.DictComp)
_TEXTS = ("say", "str", "list", "tuple", "join", "sorted", "repr")


def _is_text(node: ast.expr) -> bool:
    """Whether an operand is written as a text or a collection, which have no sign."""
    if isinstance(node, ast.BinOp):
        return _is_text(node.left) or _is_text(node.right)
    text = isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    return text or isinstance(node, _COLLECTIONS) or (isinstance(node, ast.Call) and _name(node.func) in _TEXTS)


def _is_mask(node: ast.BinOp) -> bool:
    """Whether bits are combined: neither sets nor types."""
    return not any(isinstance(one, ast.Set | ast.Dict | ast.SetComp | ast.DictComp) for one in ast.walk(node)) and any(
        (isinstance(one, ast.Constant) and isinstance(one.value, int)) or isinstance(one, ast.Attribute)
        for one in (node.left, node.right)
    )


def _has_tiny(node: ast.expr) -> bool:
    """Whether a number as small as a rounding error is added or compared."""
    numbers = (one.value for one in ast.walk(node) if isinstance(one, ast.Constant))
    return any(isinstance(value, float) and 0 < abs(value) < 1e-5 for value in numbers)


def _prints(body: Sequence[ast.stmt]) -> bool:
    """Whether a branch does no more than say something."""
    return all(
        isinstance(one, ast.Expr) and isinstance(one.value, ast.Call) and bool(_MESSAGES.match(_name(one.value.func)))
        for one in body
    )


def _keeps_the_best(node: ast.If) -> bool:
    """`if a > best: best = a`: among equals, which one is kept makes no difference to the value."""
    if not isinstance(node.test, ast.Compare) or len(node.test.comparators) != 1:
        return False
    sides = {ast.dump(node.test.left), ast.dump(node.test.comparators[0])}
    kept = [ast.unparse(target) for one in node.body if isinstance(one, ast.Assign) for target in one.targets]
    return any(ast.dump(ast.parse(target, mode="eval").body) in sides for target in kept)


def _means_the_same(mutant: Mutant) -> bool:
    """Changes that no test can see: caches, where the value at an edge is 0 anyway, how a file is written."""
    line = mutant.old
    if mutant.kind == "edge" and re.search(r"(<|<=|>|>=) 0(\.0)?\b", line):
        return bool(re.search(r"\bif\b.* else 0|\*", line))
    if mutant.kind == "true for false":
        return bool(re.search(r"strict=|daemon=|ensure_ascii|exist_ok|non_blocking|frozen=|ignore_errors", line))
    return bool(re.search(r"cache_clear\(|lru_cache|__slots__|stacklevel|buffering=", line))


# -- choosing


def files_of(pattern: str) -> list[str]:
    """Files that a glob names, as paths from the root."""
    return sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern) if path.is_file())


def tests_in(room: Room) -> list[str]:
    """Test files of a room; those of the labs' kit stand with the labs'."""
    return files_of(f"tests/{room.split('/')[0]}/**/test_*.py")


def mutants_of(room: Room) -> list[Mutant]:
    """All mutants of a room that the rules make, in the order of their keys."""
    found: dict[str, Mutant] = {}
    for path in files_of(f"dlojz/{room}/**/*.py"):
        inner = [other for other in ROOMS if other.startswith(f"{room}/") and path.startswith(f"dlojz/{other}/")]
        if inner or (room != "display" and _DRAWN_MODULES.search(path)) or path.endswith("__init__.py"):
            continue
        for mutant in _Rules(room, path).found:
            if not _means_the_same(mutant):
                found.setdefault(mutant.key, mutant)
    return [found[key] for key in sorted(found)]


def sample(mutants: Iterable[Mutant], most: int) -> list[Mutant]:
    """So many mutants of one room, kind after kind, and of one function again only when all others have one.

    A longer sample begins with the shorter one.
    """
    queues: dict[Kind, list[Mutant]] = {kind: [] for kind in KINDS}
    for mutant in mutants:
        queues[mutant.kind].append(mutant)
    taken: Counter[tuple[str, str]] = Counter()
    chosen: list[Mutant] = []
    while len(chosen) < most and any(queues.values()):
        for queue in queues.values():
            if not queue or len(chosen) == most:
                continue
            best = min(queue, key=lambda one: taken[one.path, one.function])
            queue.remove(best)
            if _is_a_change(best):
                taken[best.path, best.function] += 1
                chosen.append(best)
    return chosen


def _is_a_change(mutant: Mutant) -> bool:
    """Whether it can be read, and is another program."""
    try:
        changed = ast.parse(mutant.changed())
    except (SyntaxError, ValueError):
        return False
    return ast.dump(changed) != ast.dump(ast.parse((ROOT / mutant.path).read_bytes()))


@cache
def imported_by(test: str) -> frozenset[str]:
    """Modules that a test file imports, also in functions, as dotted names; of `from a import b`, a and a.b."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / test).read_bytes())):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
    return frozenset(found)


def tests_of(mutant: Mutant) -> list[list[str]]:
    """Test files in four groups, in the order in which they run; the module's own examples are in the first."""
    dotted, room = mutant.path.removesuffix(".py").replace("/", "."), tests_in(mutant.room)

    def knows(test: str) -> bool:
        return dotted in imported_by(test) or Path(test).stem == f"test_{Path(mutant.path).stem}"

    outside = [
        one for one in files_of("tests/**/test_*.py") if one not in room and not one.startswith(SLOW) and knows(one)
    ]
    folder = dotted.rpartition(".")[0] + "."
    near = [one for one in room if knows(one)]
    beside = [one for one in room if one not in near and any(name.startswith(folder) for name in imported_by(one))]
    examples = [mutant.path] if ">>> " in (ROOT / mutant.path).read_text(encoding="utf-8") else []
    rest = [one for one in room if one not in near and one not in beside]
    return [examples + near, beside, rest, outside if len(outside) <= FEW else []]


# -- running


SERVER = """
import ctypes, importlib, json, os, psutil, sys
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what a test leaves running becomes this process's child
for name in (
    "hypothesis.extra.numpy", "matplotlib.figure", "nbclient", "nbval.kernel", "numpy", "psutil", "pydantic", "pytest",
    "rich.table", "scipy.optimize", "torch.distributed", "torch.utils.checkpoint", "torch.fx", "tyro",
    "typeguard", "anyio.pytest_plugin",
):
    try:
        importlib.import_module(name)
    except ImportError:
        pass
for line in sys.stdin:
    task = json.loads(line)
    child = os.fork()
    if not child:
        os.setsid()
        log = os.open(task["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number, to in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
            os.dup2(to, number)
        sys.path[0] = os.getcwd()
        sys.argv = ["pytest", *task["arguments"]]
        times = open(task["times"], "w")
        class Times:
            def pytest_runtest_logreport(self, report):
                print(report.duration, report.nodeid, file=times, flush=True)
        sys.exit(importlib.import_module("pytest").main(task["arguments"], plugins=[Times()]))
    print(child, flush=True)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    while left := psutil.Process().children(recursive=True):
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        psutil.wait_procs(left, timeout=1)
    print(code, flush=True)
"""
"""Runs pytest in a fork of a process that has imported what takes long and no mutant changes."""

PROBE = """
import os
_seen = set()

def reached(key):
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    if (key, test) not in _seen:
        _seen.add((key, test))
        try:
            file = os.open({path!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(file, f"{{key}} {{test}}\\n".encode())
            os.close(file)
        except OSError:
            pass
"""
"""A module that notes which test reaches a statement, also in processes that the test starts."""


class Tree:
    """A copy of the tree in which one file at a time is wrong."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tree"
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
        for name in listed.stdout.decode().split("\0"):
            if name and (ROOT / name).is_file():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.folder / name)
        self._stamp = int(time.time()) - 10**7
        self._keeps_traces = False
        self._cache, self._reached = folder / "cache", folder / "reached"
        self._log, self._times = folder / "log", folder / "times"
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(self.folder), "XDG_CACHE_HOME": str(self._cache)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def _answer(self) -> int:
        """One line, unbuffered: what is not read yet must be seen by `select`."""
        assert self._server.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            if not (read := os.read(self._server.stdout.fileno(), 1)):
                raise SystemExit("the process that runs the tests has ended: look for what was printed above.")
            line += read
        return int(line)

    @contextmanager
    def changed(self, files: Mapping[str, bytes]) -> Iterator[None]:
        """Other content in some files, with a date of its own: compiled code of what was there must not be taken."""
        traces = tuple(f"dlojz/{source}" for source in TRACED_BY)
        self._keeps_traces = not any(path.startswith(traces) for path in files)
        for path, content in files.items():
            self._write(path, content)
        try:
            yield
        finally:
            for path in files:
                self._write(path, (ROOT / path).read_bytes())

    def _write(self, path: str, content: bytes) -> None:
        self._stamp += 10
        (self.folder / path).write_bytes(content)
        os.utime(self.folder / path, (self._stamp, self._stamp))

    def pytest(self, tests: Sequence[str], limit_s: float = LONGEST_S) -> tuple[str, str, float]:
        """Run tests until one fails: `green`, `red`, `late` or `none`; which test; seconds.

        What is stored from earlier runs is deleted first, so that nothing is read that would be computed; but traces,
        which are most of the time, are kept where no module that makes them is changed.
        """
        for stored in self._cache.glob("dlojz/*" if self._keeps_traces else "*"):
            if not (self._keeps_traces and stored.name == "traces"):
                shutil.rmtree(stored, ignore_errors=True)
        begun = time.monotonic()
        arguments = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=no", "--show-capture=no", *tests]
        task = json.dumps({"arguments": arguments, "log": str(self._log), "times": str(self._times)})
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(task.encode() + b"\n")
        self._server.stdin.flush()
        group = self._answer()
        late = not select.select([self._server.stdout], [], [], limit_s)[0]
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)  # also what a test has left running
        code, seconds = self._answer(), time.monotonic() - begun
        output = self._log.read_text(encoding="utf-8", errors="replace")
        if late or code in (0, 5):
            return "late" if late else "none" if code else "green", f"not done after {limit_s:.0f} s", seconds
        told = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output, re.MULTILINE)
        return "red", told[1] if told else f"pytest ended with {code}", seconds

    def probe(self, test: str, mutants: Sequence[Mutant]) -> dict[str, Any]:
        """Run one test file on probed modules: whether it is green, its seconds, per key the tests that reach it."""
        self._reached.unlink(missing_ok=True)
        (self.folder / "mutant_probe.py").write_text(PROBE.format(path=str(self._reached)), encoding="utf-8")
        with self.changed(probed(mutants)):
            said, by, seconds = self.pytest([test])
        took_s: dict[str, float] = defaultdict(float)
        for line in self._times.read_text(encoding="utf-8").splitlines():
            duration, _, name = line.partition(" ")
            took_s[name] += float(duration)
        keys: dict[str, dict[str, float]] = {one.key: {} for one in mutants}
        lines = self._reached.read_text(encoding="utf-8").splitlines() if self._reached.exists() else []
        for line in lines:
            key, _, told = line.partition(" ")
            name = told.rpartition(" (")[0]
            if name in took_s:
                keys[key][name] = round(took_s[name], 2)
        return {"green": said in ("green", "none"), "by": by, "seconds": round(seconds, 1), "keys": keys}


def probed(mutants: Iterable[Mutant]) -> dict[str, bytes]:
    """Modules with a probe before each statement that a mutant changes, where it stands in a function."""
    lines: dict[str, list[bytes]] = {}
    places = {(mutant.path, place, mutant.key) for mutant in mutants if (place := _statement(mutant))}
    for path, (number, column), key in sorted(places, reverse=True):
        lines.setdefault(path, (ROOT / path).read_bytes().split(b"\n"))
        probe = f'import mutant_probe; mutant_probe.reached("{key}")'
        lines[path].insert(number - 1, b" " * column + probe.encode())
    return {path: b"\n".join(one) for path, one in lines.items()}


@cache
def _statements(path: str) -> list[tuple[int, int, int]]:
    """Statements within functions before which a line can be put: first and last line, column."""
    source = (ROOT / path).read_bytes()
    lines, found = source.split(b"\n"), set()
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in (one for statement in function.body for one in ast.walk(statement)):
            if isinstance(node, ast.stmt):
                first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
                before, after = lines[first - 1][: node.col_offset], lines[first - 1][node.col_offset :]
                if not before.strip() and not after.startswith(b"elif"):
                    found.add((first, node.end_lineno or first, node.col_offset))
    return sorted(found)


def _statement(mutant: Mutant) -> tuple[int, int] | None:
    """Line and column of the innermost statement that a mutant changes; None outside of functions."""
    around = [(first, column) for first, last, column in _statements(mutant.path) if first <= mutant.line <= last]
    return around[-1] if around else None


@cache
def digest_of(files: tuple[str, ...]) -> str:
    """Of the content of files, to see whether they have changed."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.encode() + (ROOT / path).read_bytes())
    return digest.hexdigest()[:16]


class Results:
    """Runs mutants, and keeps what is known: with a path, in a file that is written whole each time.

    `mutants` has what became of each key: verdict, the test that saw it, seconds, the tests that ran; `files` has per
    test file its seconds without a mutant, and per key the tests that reach it.
    """

    def __init__(self, path: Path | None, chosen: Sequence[Mutant], nearest: bool) -> None:
        self._path, self._chosen, self._nearest = path, chosen, nearest
        stored = json.loads(path.read_text(encoding="utf-8")) if path and path.exists() else {}
        self._files: dict[str, dict[str, Any]] = stored.get("files", {})
        self._mutants: dict[str, dict[str, Any]] = stored.get("mutants", {})

    def _write(self) -> None:
        if self._path:
            beside = self._path.with_suffix(".new")
            beside.write_text(json.dumps({"files": self._files, "mutants": self._mutants}, indent=1), encoding="utf-8")
            beside.replace(self._path)

    def _groups(self, mutant: Mutant) -> list[list[str]]:
        groups = tests_of(mutant)
        return [group for group in (groups[:1] if self._nearest else groups) if group]

    def of(self, mutant: Mutant) -> dict[str, Any] | None:
        """A result that still holds."""
        found = self._mutants.get(mutant.key)
        tests = digest_of(tuple(test for group in self._groups(mutant) for test in group))
        return found if found and (found["verdict"] == "killed" or found["tests"] == tests) else None

    def _reaching(self, tree: Tree, mutant: Mutant, test: str) -> dict[str, float]:
        """Tests of a file that reach what a mutant changes, or the file itself where that is in no function."""
        known, of = self._files.get(test), digest_of((test,))
        if known is None or known["of"] != of or mutant.key not in known["keys"]:
            open_ones = [one for one in self._chosen if not self.of(one)]
            known = self._files[test] = {"of": of, **tree.probe(test, open_ones)}
            self._write()
        if not known["green"]:
            return {}
        found: dict[str, float] = known["keys"][mutant.key]
        return found if _statement(mutant) else {test: known["seconds"]}

    def _seen(self, tree: Tree, mutant: Mutant, tests: Mapping[str, float]) -> str:
        """Which of some tests sees a mutant; empty if none does."""
        left = sorted(tests, key=lambda name: tests[name])
        while left:
            limit_s = 60 + 10 * sum(tests[name] for name in left)
            with tree.changed({mutant.path: mutant.changed()}):
                said, by, _ = tree.pytest(left, limit_s)
            if said in ("green", "none"):
                return ""
            again = [by] if by in left else left
            if tree.pytest(again, limit_s)[0] == "green":
                return by
            left = [name for name in left if name not in again]  # red or late without the mutant, too
        return ""

    def run(self, tree: Tree, mutant: Mutant) -> dict[str, Any]:
        """What becomes of one mutant."""
        begun, by, groups = time.monotonic(), "", self._groups(mutant)
        for group in groups:
            reaching: dict[str, float] = {}
            for test in sorted(group, key=lambda one: self._files.get(one, {}).get("seconds", 0.0)):
                reaching |= self._reaching(tree, mutant, test)
            if by := self._seen(tree, mutant, reaching):
                break
        found = self._mutants[mutant.key] = {
            "verdict": "killed" if by else "survived",
            "by": by,
            "seconds": round(time.monotonic() - begun, 1),
            "tests": digest_of(tuple(test for group in groups for test in group)),
            **asdict(mutant),
        }
        self._write()
        return found

    def red(self) -> list[str]:
        """Test files that are red without a mutant, and were left out."""
        return [f"{test} ({known['by']})" for test, known in self._files.items() if not known["green"]]


# -- telling


def _said(mutant: Mutant) -> str:
    return f"{mutant.path}:{mutant.line} {mutant.function} — {mutant.kind}\n  - {mutant.old}\n  + {mutant.new}"


def told(chosen: Sequence[Mutant], results: Results, console: Console) -> float:
    """Print survivors and the table per room; return the share of those run that were killed."""
    found = {mutant: results.of(mutant) for mutant in chosen}
    for mutant, result in found.items():
        if result and result["verdict"] != "killed":
            console.print(f"\n{_said(mutant)}", markup=False, highlight=False, soft_wrap=True)
    for line in results.red():
        console.print(f"\nred without a mutant, left out: {line}", markup=False)
    table = Table("room", "mutants", "run", "killed", "survived", "killed %", "s each")
    share = 0.0
    for room in (*dict.fromkeys(mutant.room for mutant in chosen), "all"):
        mine = [result for mutant, result in found.items() if room in (mutant.room, "all")]
        done = [result for result in mine if result]
        killed = sum(result["verdict"] == "killed" for result in done)
        share = killed / len(done) if done else 0.0
        each = f"{sum(result['seconds'] for result in done) / len(done):.0f}" if done else "—"
        table.add_row(room, *map(str, (len(mine), len(done), killed, len(done) - killed)), f"{100 * share:.0f}", each)
    console.print(table)
    return share


def main(
    room: tuple[Room, ...] = (),
    most: int = 126,
    resume: Path | None = None,
    nearest: bool = False,
    listed: Annotated[bool, tyro.conf.arg(name="list")] = False,
) -> int:
    """Make small wrong changes, run the tests on each, and list those that no test sees.

    Args:
        room: rooms to take them from; by default all.
        most: mutants in all, shared evenly among the rooms.
        resume: a JSON file in which results are kept as they come, and from which a run goes on.
        nearest: run only the test files that import or name the changed module.
        listed: print the mutants and run none.
    """
    rooms, console = room or ROOMS, Console()
    each, more = divmod(most, len(rooms))
    chosen = [one for n, name in enumerate(rooms) for one in sample(mutants_of(name), each + (n < more))]
    if listed:
        for mutant in chosen:
            console.print(_said(mutant), markup=False, highlight=False, soft_wrap=True)
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the copy goes, and what is known is told
    results = Results(resume, chosen, nearest)
    with tempfile.TemporaryDirectory(prefix="dlojz-mutants-") as folder, suppress(KeyboardInterrupt):
        tree = Tree(Path(folder))
        for number, mutant in enumerate(chosen, 1):
            if results.of(mutant) is None:
                result = results.run(tree, mutant)
                told_as = f"{result['verdict']} in {result['seconds']} s {result['by']}"
                console.print(f"{number}/{len(chosen)} {mutant.path}:{mutant.line} {told_as}", markup=False)
    return 0 if told(chosen, results, console) >= GOAL else 1


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
