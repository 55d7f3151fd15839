"""Measure the house: files, lines, circles, imports upward, hermits, names, comments, and how fast `dlojz` answers.

    python benchmarks/house.py            # the tree as it stands: seconds
    python benchmarks/house.py --times    # and the import of dlojz and three commands, timed: half a minute

`tests/test_house.py` holds the rules with the same functions.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import time
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "dlojz"

FLOORS = (
    "base", "hardware", "models", "processes", "data", "config", "results", "pipeline", "by_hand", "compress",
    "prediction", "cost_model", "compare", "train", "libraries", "runnable", "planner", "display", "running", "watch",
    "ranks", "labs", "campaign", "cli",
)  # fmt: skip
"""The rooms from the ground up: each imports only those before it."""
TAUGHT = ("by_hand/", "models/", "libraries/programs/")
"""Code that is read aloud in class."""
MAX_LINES, MAX_TAUGHT_LINES = 900, 300
HERMIT_LINES = 150
MAX_ENTRIES, MAX_TOP_ENTRIES = 16, 26


class Task(NamedTuple):
    """The file or folder to open for a task, and a text that stands there only if it is the right one."""

    path: str
    text: str = ""


TASKS = {
    "add a field to a run": Task("dlojz/config/fields.py", "class RunFields"),
    "add a pipeline schedule": Task("dlojz/pipeline/data/schedules.toml", "[[schedule]]"),
    "add an optimizer": Task("dlojz/config/optimizers.py", "OptimizerSpec("),
    "change the message of a failing exercise of lab 06": Task("dlojz/labs/lab06_tensor/exercises_layers.md", "## "),
    "add a GPU": Task("dlojz/hardware/data/gpus"),
    "fix the memory forecast of FSDP2": Task("dlojz/prediction/engine_memory_sharded.py", "class FSDP2"),
    "add a line to dlojz compare": Task("dlojz/display/tables.py", "def _communication_lines("),
    "add a lab": Task("dlojz/labs/kit/data/labs.toml", "[[lab]]"),
    "change the palette": Task("dlojz/display/style.py", "#"),
    "a SLURM option for a new cluster": Task("dlojz/running/slurm/slurm_job.py", "#SBATCH"),
    "the modules that a site loads": Task("dlojz/hardware/data/clusters/jean_zay_a100.toml", "torch_module"),
    "the French of a hint": Task("dlojz/labs/lab06_tensor/exercises_layers.md", "## hint"),
}
"""Twelve things that somebody comes to do, and where (CONTRIBUTING.md says more of each)."""

_VAGUE = """
one own told found made known held each given asked way ways place places other others rest what here there whole
shown sent taken kept left read said listed more former behind beside its wanted first last at most least named done
seen again some where of now alone mine both every out by used apart same alike moved added entered needed why look
that this them these those which such gone thing things near
"""
VAGUE = frozenset(_VAGUE.split())
"""Names that do not say what they hold: pronouns, participles, adverbs. `first` and `last` are counted too, though a
range may have them: the ceilings leave room for the few places where such a word is the field's own."""
_DIRECTIVE = re.compile(r"#\s*(?:!|noqa|type:|fmt:|pragma|mypy|ruff|%%)")
REGISTRIES = {
    "optimizers": "config/optimizers.py",
    "engines": "config/engines.py",
    "schedules": "pipeline/schedule_catalogue.py",
}
"""Where each name is registered; a name spelled elsewhere is a second place to change."""

Kind = Literal["top", "lazy", "type", "name"]


class Edge(NamedTuple):
    """One file imports another: when it is loaded, within a function, for the type checker alone, or by its name.

    A name in a text (`"dlojz.running.worker"`) is no import of the file that holds it: whoever looks it up there
    imports it.
    """

    importer: str
    imported: str
    kind: Kind
    line: int


def files() -> list[str]:
    """Every module, as its path below the package."""
    return sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))


@cache
def tree_of(file: str) -> ast.Module:
    """The syntax of a module."""
    return ast.parse((PACKAGE / file).read_text(encoding="utf-8"))


@cache
def lines_of(file: str) -> int:
    """The number of its lines."""
    return len((PACKAGE / file).read_text(encoding="utf-8").splitlines())


def file_of(dotted: str) -> str | None:
    """The file of a module of the package, by its dotted name; None for what is none."""
    path = dotted.removeprefix("dlojz").removeprefix(".").replace(".", "/")
    for found in (f"{path}.py" if path else "__init__.py", f"{path}/__init__.py"):
        if (PACKAGE / found).is_file():
            return found
    return None


@cache
def edges() -> tuple[Edge, ...]:
    """Every import between two files of the package, of every kind; a name of a package leads to where it is
    defined."""
    return tuple(dict.fromkeys(one for file in files() for one in _edges_of(file)))


def _edges_of(file: str) -> Iterator[Edge]:
    tree = tree_of(file)
    top = {id(node) for node in tree.body}
    typed = {id(sub) for node in tree.body if _is_type_checking(node) for sub in ast.walk(node)}
    for node in ast.walk(tree):
        kind: Kind = "type" if id(node) in typed else "top" if id(node) in top else "lazy"
        if isinstance(node, ast.Constant):
            kind = "name"
        for found in _imported(node):
            if found is not None and found != file:
                yield Edge(file, found, kind, getattr(node, "lineno", 0))


def _is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _imported(node: ast.AST) -> Iterator[str | None]:
    if isinstance(node, ast.Import):
        yield from (file_of(alias.name) for alias in node.names if alias.name.startswith("dlojz."))
    elif isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("dlojz."):
        for alias in node.names:
            found = file_of(f"{node.module}.{alias.name}") or file_of(node.module or "")
            if found != "__init__.py":  # `dlojz` itself: its front
                yield found
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"dlojz(\.\w+)+", node.value):
        yield file_of(node.value) if node.value.count(".") > 1 else None  # a module that is imported by its name


def room_of(file: str) -> str:
    """The room of a file: the first part of its path; each lab is a room, and so is the labs' kit."""
    parts = file.split("/")
    if parts[0] == "labs" and len(parts) > 2:
        return "/".join(parts[:2])
    return parts[0].removesuffix(".py")


def floor_of(file: str) -> int | None:
    """The floor of its room, from 0; None for the package's own front doors."""
    top = file.split("/", 1)[0].removesuffix(".py")
    return FLOORS.index(top) if top in FLOORS else None


def upward() -> list[Edge]:
    """Imports of a room that does not stand below, whatever their kind."""
    found = []
    for edge in edges():
        if edge.importer in FRONT_DOORS or edge.kind == "name" or room_of(edge.importer) == room_of(edge.imported):
            continue
        here, there = floor_of(edge.importer), floor_of(edge.imported)
        if here is None or there is None or there > here or (here == there and not _within_labs(edge)):
            found.append(edge)
    return found


FRONT_DOORS = ("__init__.py", "__main__.py", "train/__main__.py", "running/__main__.py")
"""What a person or a launcher opens: they lead into the house, and nothing imports them."""


def _within_labs(edge: Edge) -> bool:
    """The kit may be imported by every lab; the front of the labs leads to the judge of scripts too."""
    there = room_of(edge.imported)
    return there == "labs/kit" or (edge.importer == "labs/__init__.py" and there == "labs/script")


def labs_that_import_labs() -> list[Edge]:
    """Imports from one lab into another."""
    return [
        edge
        for edge in edges()
        if edge.importer.startswith("labs/lab")
        and edge.imported.startswith("labs/lab")
        and room_of(edge.importer) != room_of(edge.imported)
    ]


def circles() -> list[list[str]]:
    """Files that import one another, whatever the kind of the imports."""
    nexts: dict[str, set[str]] = defaultdict(set)
    for edge in edges():
        if edge.importer not in FRONT_DOORS and edge.kind != "name":
            nexts[edge.importer].add(edge.imported)
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(file: str) -> None:
        number[file] = low[file] = len(number)
        stack.append(file)
        for other in sorted(nexts[file]):
            if other not in number:
                visit(other)
                low[file] = min(low[file], low[other])
            elif other in stack:
                low[file] = min(low[file], number[other])
        if low[file] == number[file]:
            at = stack.index(file)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    for file in files():
        if file not in number:
            visit(file)
    sys.setrecursionlimit(limit)
    return sorted(found)


def hermits() -> list[tuple[str, str]]:
    """Short modules with one importer, which stands in their own room: they belong to it.

    Not those that would make taught code longer than it may be, nor those that are found by their names. The face of a
    package, which only hands names on, is no importer.
    """
    importers: dict[str, set[str]] = defaultdict(set)
    for edge in edges():
        if not edge.importer.endswith("__init__.py") or room_of(edge.importer) != room_of(edge.imported):
            importers[edge.imported] |= {edge.importer} if edge.kind != "name" else {edge.importer, "by its name"}
    found = []
    for file in files():
        if file.endswith(("__init__.py", "__main__.py")) or lines_of(file) >= HERMIT_LINES or len(importers[file]) != 1:
            continue
        (only,) = importers[file]
        fits = not only.startswith(TAUGHT) or lines_of(file) + lines_of(only) <= MAX_TAUGHT_LINES
        if room_of(only) == room_of(file) and fits:
            found.append((file, only))
    return found


def long_files() -> list[tuple[str, int]]:
    """Files above their room's number of lines."""
    return [
        (file, lines_of(file))
        for file in files()
        if lines_of(file) > (MAX_TAUGHT_LINES if file.startswith(TAUGHT) else MAX_LINES)
    ]


_NOT_READ = ("__pycache__", "py.typed")


def full_folders() -> list[tuple[str, int]]:
    """Folders whose listing does not fit the eye; the data files count too."""
    entries: Counter[str] = Counter()
    for path in {PACKAGE, *(path for path in PACKAGE.rglob("*") if path.is_dir())}:
        if path.name == "__pycache__":
            continue
        inside = [one for one in path.iterdir() if one.name not in _NOT_READ and not one.name.startswith(".")]
        entries[str(path.relative_to(PACKAGE))] = len(inside)
    return sorted(
        (name, count) for name, count in entries.items() if count > (MAX_TOP_ENTRIES if name == "." else MAX_ENTRIES)
    )


def shared_file_names() -> dict[str, list[str]]:
    """File names that stand twice in the package; `exercises…`, `figures…` and `__…__` may."""
    named: dict[str, list[str]] = defaultdict(list)
    for file in files():
        name = Path(file).name
        if not name.startswith(("exercises", "figures", "__")):
            named[name].append(file)
    return {name: found for name, found in named.items() if len(found) > 1}


def shared_class_names() -> dict[str, list[str]]:
    """Public classes that bear one name."""
    named: dict[str, list[str]] = defaultdict(list)
    for file in files():
        for node in tree_of(file).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                named[node.name].append(file)
    return {name: found for name, found in named.items() if len(found) > 1}


def public_names(file: str) -> Iterator[str]:
    """Functions and classes of a module that bear no underscore."""
    for node in tree_of(file).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


def without_user() -> list[str]:
    """Public names that nothing but tests mentions: neither package, labs' sources, benchmarks, SLURM files nor docs.

    The commands are found by their names: `dlojz NAME` calls `NAME_command`.
    """
    words: Counter[str] = Counter()
    for path in _texts():
        words.update(set(re.findall(r"[A-Za-z_]\w*", path.read_text(encoding="utf-8"))))
    own: dict[str, Counter[str]] = {}
    for file in files():
        own[file] = Counter(re.findall(r"[A-Za-z_]\w*", (PACKAGE / file).read_text(encoding="utf-8")))
    return [
        f"{file}:{name}"
        for file in files()
        for name in public_names(file)
        if own[file][name] == 1 and words[name] == 1 and not (file.startswith("cli/") and name.endswith("_command"))
    ]


def _texts() -> Iterable[Path]:
    for folder, pattern in (
        ("dlojz", "*.py"), ("dlojz", "*.toml"), ("solutions", "*.py"), ("benchmarks", "*.py"), ("slurm", "*"),
        ("docs", "*.md"), (".", "*.md"),
    ):  # fmt: skip
        found = ROOT.glob(pattern) if folder == "." else (ROOT / folder).rglob(pattern)
        yield from (
            path for path in found if path.is_file() and path.suffix in (".py", ".md", ".slurm", ".toml", ".sh")
        )


def places_of(pattern: str) -> dict[str, int]:
    """In which files of the package a pattern stands, and how often."""
    found = {file: len(re.findall(pattern, (PACKAGE / file).read_text(encoding="utf-8"))) for file in files()}
    return {file: count for file, count in found.items() if count}


def missing_tasks() -> list[str]:
    """Tasks whose file is not there, or is not the one in which it is done."""
    return [
        name
        for name, task in TASKS.items()
        if not (ROOT / task.path).exists() or (task.text and task.text not in (ROOT / task.path).read_text("utf-8"))
    ]


def bound_names(file: str) -> Iterator[str]:
    """Every name that a module binds: assigned, looped over, a parameter; `self` and `cls` are nobody's choice."""
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg) and node.arg not in ("self", "cls"):
            yield node.arg


def top_room(file: str) -> str:
    """The room of a file, all labs together."""
    return file.split("/", maxsplit=1)[0].removesuffix(".py")


def vague_percent() -> dict[str, float]:
    """Share of vague names among those that are bound, in percent, by room and in all (`all`).

    What students read and write, `solutions`, counts as a room.
    """
    bound: Counter[str] = Counter()
    vague: Counter[str] = Counter()
    solutions = map(str, (ROOT / "solutions").glob("*.py"))
    for file, room in [*((file, top_room(file)) for file in files()), *((path, "solutions") for path in solutions)]:
        names = list(bound_names(file))
        for counted in (room, "all"):
            bound[counted] += len(names)
            vague[counted] += sum(name in VAGUE for name in names)
    return {room: 100 * vague[room] / count for room, count in bound.items() if count}


def logic_lines(file: str) -> int:
    """Count the lines of functions that compute: no signature, docstring, refusal, sentence, comment or blank line."""
    text = (PACKAGE / file).read_text(encoding="utf-8")
    logic: set[int] = set()
    left_out = {number for number, line in enumerate(text.splitlines(), 1) if not line.strip().split("#")[0]}
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            logic |= _span(node)
            documented = ast.get_docstring(node) is not None
            left_out |= set(range(node.lineno, node.body[0].lineno)) | (_span(node.body[0]) if documented else set())
        elif isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and _is_sentence(node)):
            left_out |= _span(node)
    return len(logic - left_out)


def _span(node: ast.stmt | ast.expr) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def _is_sentence(call: ast.Call) -> bool:
    """Whether a call carries a text in both languages."""
    return {"en", "fr"} <= {keyword.arg for keyword in call.keywords} or (
        isinstance(call.func, ast.Name) and call.func.id in ("Said", "Mistake", "Wrong", "phrase")
    )


def comments(file: str) -> int:
    """Count the comments of a module; what speaks to a tool (`# noqa`) is none."""
    text = (PACKAGE / file).read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type == tokenize.COMMENT and not _DIRECTIVE.match(token.string) for token in tokens)


def comments_per_100() -> dict[str, float]:
    """Comments per 100 lines of logic, by room and in all (`all`)."""
    counts: Counter[str] = Counter()
    logic: Counter[str] = Counter()
    for file in files():
        for room in (top_room(file), "all"):
            counts[room] += comments(file)
            logic[room] += logic_lines(file)
    return {room: 100 * counts[room] / lines for room, lines in logic.items() if lines}


def lines_of_tests() -> int:
    """Lines of Python in the tests."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / "tests").rglob("*.py"))


def registered_names() -> dict[str, frozenset[str]]:
    """What each registry registers."""
    from dlojz.config.engines import ENGINES
    from dlojz.config.optimizers import OPTIMIZERS
    from dlojz.pipeline.schedule_catalogue import SCHEDULES

    return {
        "optimizers": frozenset(OPTIMIZERS),
        "engines": frozenset(ENGINES),
        "schedules": frozenset(SCHEDULES),
    }


def spelled_elsewhere() -> dict[str, int]:
    """How often a registered name stands as a literal in another file of the package, by registry; labs left out, as
    their exercises are about single ones."""
    found = dict.fromkeys(REGISTRIES, 0)
    for registry, names in registered_names().items():
        for file in files():
            if file == REGISTRIES[registry] or file.startswith("labs/"):
                continue
            found[registry] += sum(
                isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names
                for node in ast.walk(tree_of(file))
            )
    return found


def tests_that_name_percent() -> float:
    """Share of tests, in percent, whose name has a word of a name of the package that they use.

    What a test uses: names imported from `dlojz` in its body and in the functions of its file that it calls.
    """
    total = naming = 0
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom | ast.Import) and _of_package(node)
            for alias in node.names
        }
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        for name, function in functions.items():
            if name.startswith("test_"):
                total += 1
                naming += bool(_words_of(name.removeprefix("test_")) & _used_words(function, functions, imported))
    return 100 * naming / total


def _of_package(node: ast.Import | ast.ImportFrom) -> bool:
    modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
    return any(f"{module}.".startswith("dlojz.") for module in modules)


def _words_of(name: str) -> set[str]:
    """The words of a name, in small letters and without a plural's s; those of three letters and less say little."""
    words = re.findall(r"[a-z]+|[A-Z][a-z]+|[A-Z]+(?![a-z])", name)
    return {word.lower().rstrip("s") for word in words if len(word) > 3 or word.isupper()}


def _used_words(test: ast.FunctionDef, functions: dict[str, ast.FunctionDef], imported: set[str]) -> set[str]:
    """Words of the imported names, and of the attributes taken from them, in a test and the helpers that it calls."""
    used: set[str] = set()
    bodies: list[ast.AST] = [test]
    called = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)} & set(functions) - {test.name}
    for node in (sub for body in (*bodies, *(functions[name] for name in called)) for sub in ast.walk(body)):
        if isinstance(node, ast.Name) and node.id in imported:
            used |= _words_of(node.id)
        elif isinstance(node, ast.Attribute):
            used |= _words_of(node.attr)
    return used


def _seconds(*words: str) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, *words], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begin


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", action="store_true", help="time the import of dlojz and three commands")
    parser.add_argument("--names", action="store_true", help="name the offenders")
    given = parser.parse_args()
    found = files()
    offenders: dict[str, list[object]] = {
        "circles": list(circles()),
        "imports upward": list(upward()),
        "labs that import labs": list(labs_that_import_labs()),
        "hermits": list(hermits()),
        f"folders of more than {MAX_ENTRIES} entries ({MAX_TOP_ENTRIES} at the top)": list(full_folders()),
        f"taught files of more than {MAX_TAUGHT_LINES} lines, others of more than {MAX_LINES}": list(long_files()),
        "file names that stand twice": list(shared_file_names().items()),
        "public classes that share a name": list(shared_class_names().items()),
        "public names without a user": list(without_user()),
        "tasks of CONTRIBUTING whose file is missing": list(missing_tasks()),
    }
    print(f"{len(found):>7}  modules, {sum(file.endswith('__init__.py') for file in found)} of them faces of packages")
    print(f"{sum(map(lines_of, found)):>7}  lines of the package, {lines_of_tests()} of the tests")
    vague, remarks = vague_percent(), comments_per_100()
    print(f"{vague['all']:>7.1f}  % of bound names are vague; {remarks['all']:.1f} comments per 100 lines of logic")
    for room in sorted(vague, key=lambda room: -vague[room]):
        print(f"{vague[room]:>14.1f} % vague, {remarks.get(room, 0):>4.1f} comments: {room}")
    for registry, count in spelled_elsewhere().items():
        print(f"{count:>7}  names of {registry} spelled outside {REGISTRIES[registry]} (labs aside)")
    print(f"{tests_that_name_percent():>7.0f}  % of tests have a word of what they test in their names")
    for name, values in offenders.items():
        print(f"{len(values):>7}  {name}")
        if given.names:
            for value in values:
                print(f"         {value}")
    for name, task in TASKS.items():
        print(f"         {name}: {task.path}")
    if given.times:
        print(f"{_seconds('-c', 'import dlojz') - _seconds('-c', 'pass'):>7.2f}  s, import dlojz")
        for words in (("models",), ("predict", "coatnet_7"), ("memory", "vit_tiny")):
            print(f"{_seconds('-m', 'dlojz', *words):>7.2f}  s, dlojz {' '.join(words)}")


if __name__ == "__main__":
    main()
