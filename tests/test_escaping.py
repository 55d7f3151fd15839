"""Whatever is shown as HTML is escaped: read off the source, and hostile names drawn by the figures.

In every f-string that holds a tag each value must be one of: `safe(…)`, a formatted number, a constant of the package,
or markup that is itself made so. Texts are followed through local names, joins and the package's own functions.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlojz.base.table import MAX_CHARACTERS, markdown_safe, safe, visible
from dlojz.labs.lab01_big_models.figures import losses

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "dlojz"
TAG = re.compile(r"</?[a-zA-Z][\w-]*(\s|/?>|$)")
ESCAPES = {"safe", "markdown_safe"}
# What cannot hold a text: numbers, and looks that the package itself has chosen.
NUMBERS = {"len", "index", "amount", "round", "int", "float", "abs"}
OWN_LOOKS = {"color", "hatch", "dashes", "key"}
PICTURES = {"picture", "png"}  # base64 of a PNG, drawn by the package, or matched against its alphabet
# Words of the package around a number; calls that give back what they were given, or what their owner holds.
PACKAGES_WORDS = {"format_bytes", "format_seconds", "axis_title", "language"}
PASSED_ON = {"say", "reversed", "sorted", "list", "tuple", "max", "min", "sum", "enumerate", "zip"}
OF_ITS_OWNER = {"get", "items", "keys", "values", "replace", "strip", "rstrip"}
NUMERIC = re.compile(r",?(\.\d+)?[dfgeFGE%]")


@cache
def trees() -> dict[Path, ast.Module]:
    """Parse the package, in the process that runs these tests alone."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def functions_by_name() -> dict[str, list[tuple[Path, ast.FunctionDef]]]:
    found: dict[str, list[tuple[Path, ast.FunctionDef]]] = defaultdict(list)
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                found[node.name].append((path, node))
    return found


class Reader:
    """Tells of an expression whether all text in it is the package's own or escaped.

    Args:
        path: the file it is in.
        scope: the function it is in.
        asked: functions that are being judged already.
    """

    def __init__(self, path: Path, scope: ast.AST, asked: frozenset[int] = frozenset()) -> None:
        self.path, self.scope, self.asked = path, scope, asked
        self.names: set[str] = set()

    def clean(self, node: ast.AST | None) -> bool:  # noqa: PLR0911 - one for each kind of expression
        match node:
            case None | ast.Constant():
                return True
            case ast.JoinedStr():
                return all(self.inserted(part) for part in node.values)
            case ast.Call():
                return self.call(node)
            case ast.BinOp():
                return self.clean(node.left) and self.clean(node.right)
            case ast.IfExp():
                return self.clean(node.body) and self.clean(node.orelse)
            case ast.BoolOp():
                return all(map(self.clean, node.values))
            case ast.List() | ast.Tuple():
                return all(map(self.clean, node.elts))
            case ast.Starred() | ast.Await():
                return self.clean(node.value)
            case ast.GeneratorExp() | ast.ListComp():
                return self.clean(node.elt)
            case ast.DictComp():
                return self.clean(node.key)
            case ast.Subscript():
                return self.clean(node.value) or (isinstance(node.slice, ast.Constant) and node.slice.value in PICTURES)
            case ast.Attribute():
                return node.attr in OWN_LOOKS or node.attr.isupper() or self.number(node)
            case ast.Name():
                return node.id.lstrip("_").isupper() or node.id in PICTURES or self.local(node.id)
        return False

    def inserted(self, part: ast.AST) -> bool:
        if not isinstance(part, ast.FormattedValue):
            return self.clean(part)
        spec = part.format_spec
        told = [one.value for one in getattr(spec, "values", ()) if isinstance(one, ast.Constant)]
        # A numeric format refuses a text by itself.
        return (len(told) == 1 and bool(NUMERIC.fullmatch(str(told[0])))) or self.clean(part.value)

    def call(self, node: ast.Call) -> bool:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ESCAPES | NUMBERS:
            return True
        if name == "join" and isinstance(node.func, ast.Attribute):
            return self.clean(node.func.value) and all(map(self.clean, node.args))
        if name in PACKAGES_WORDS:
            return True
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        if name in PASSED_ON:
            return all(map(self.clean, given))
        if name in OF_ITS_OWNER and isinstance(node.func, ast.Attribute):
            looked_up = [] if name == "get" else given[:1]
            return self.clean(node.func.value) and all(map(self.clean, [*looked_up, *given[1:]]))
        judged = functions_by_name().get(name, [])
        here = [found for found in judged if found[0] == self.path] or judged
        return bool(here) and all(returns_markup(path, function, self.asked) for path, function in here)

    def number(self, node: ast.Attribute) -> bool:
        """Whether a field is declared as a number wherever the package declares one of that name."""
        declared = declared_fields().get(node.attr, set())
        for argument in ast.walk(self.scope):
            if isinstance(argument, ast.arg) and argument.arg == getattr(node.value, "id", "") and argument.annotation:
                declared = declared_fields().get(f"{ast.unparse(argument.annotation)}.{node.attr}", declared)
        return bool(declared) and declared <= {"int", "float", "int | None", "float | None"}

    def local(self, name: str) -> bool:
        """Whether every value that a local name gets is clean."""
        if name in self.names:
            return True
        self.names.add(name)
        values = list(self.values_of(name))
        return bool(values) and all(map(self.clean, values))

    def values_of(self, name: str) -> Iterator[ast.AST | None]:
        for node in ast.walk(self.scope):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name) and target.id == name:
                        yield node.value
                    elif isinstance(target, ast.Tuple) and any(getattr(one, "id", "") == name for one in target.elts):
                        yield from self.unpacked(target, node.value, name)
            elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
                if getattr(node.target, "id", "") == name:
                    yield node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if getattr(node.func.value, "id", "") == name and node.func.attr in ("append", "extend"):
                    yield from node.args
            elif isinstance(node, ast.For | ast.comprehension):
                yield from self.looped(node, name)
            elif isinstance(node, ast.arg) and node.arg == name:
                kind = ast.unparse(node.annotation) if node.annotation else ""
                yield ast.Constant(0) if kind in ("int", "float", "bool") else node

    def unpacked(self, target: ast.Tuple, value: ast.AST, name: str) -> Iterator[ast.AST]:
        place = [getattr(one, "id", "") for one in target.elts].index(name)
        if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
            yield value.elts[place]
        else:
            yield value

    def looped(self, node: ast.For | ast.comprehension, name: str) -> Iterator[ast.AST]:
        if isinstance(node.target, ast.Name) and node.target.id == name:
            yield ast.Constant(0) if getattr(getattr(node.iter, "func", None), "id", "") == "range" else node.iter
        elif isinstance(node.target, ast.Tuple):
            for place, one in enumerate(node.target.elts):
                if getattr(one, "id", "") != name:
                    continue
                called = getattr(getattr(node.iter, "func", None), "id", "")
                if called == "enumerate" and place == 0:
                    yield ast.Constant(0)
                elif getattr(getattr(node.iter, "func", None), "attr", "") == "items" and place > 0:
                    yield node  # what a dict holds is not followed
                elif isinstance(node.iter, ast.Tuple | ast.List):
                    yield from (row.elts[place] if isinstance(row, ast.Tuple) else row for row in node.iter.elts)
                else:
                    yield node.iter


@cache
def declared_fields() -> dict[str, set[str]]:
    """Kinds of the fields and properties of all classes, by name and by class and name."""
    found: dict[str, set[str]] = defaultdict(set)
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                for line in node.body:
                    if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                        name, kind = line.target.id, ast.unparse(line.annotation)
                    elif isinstance(line, ast.FunctionDef) and line.returns is not None and line.decorator_list:
                        name, kind = line.name, ast.unparse(line.returns)
                    else:
                        continue
                    found[name].add(kind)
                    found[f"{node.name}.{name}"].add(kind)
    return found


def returns_markup(path: Path, function: ast.FunctionDef, asked: frozenset[int]) -> bool:
    """Whether all that a function gives back is clean; a function that asks itself is, if the rest of it is."""
    if id(function) in asked:
        return True
    reader = Reader(path, function, asked | {id(function)})
    given = [node.value for node in ast.walk(function) if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom)]
    return bool(given) and all(map(reader.clean, given))


def with_scope(tree: ast.AST, scope: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        inner = node if isinstance(node, ast.FunctionDef) else scope
        yield node, inner
        yield from with_scope(node, inner)


def holds_a_tag(node: ast.AST) -> bool:
    constants = node.values if isinstance(node, ast.JoinedStr) else [node]
    return any(
        isinstance(one, ast.Constant) and isinstance(one.value, str) and TAG.search(one.value) for one in constants
    )


def unescaped(path: Path, tree: ast.AST) -> list[str]:
    """Where a file puts a text into HTML that nobody has escaped."""
    found = []
    for node, scope in with_scope(tree, tree):
        where = f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)}"
        reader = Reader(path, scope)
        if isinstance(node, ast.JoinedStr) and holds_a_tag(node):
            found += [
                f"{where} {ast.unparse(part.value)}"
                for part in node.values
                if isinstance(part, ast.FormattedValue) and not reader.inserted(part)
            ]
        modulo = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and holds_a_tag(node.left)
        formatted = isinstance(node, ast.Attribute) and node.attr == "format" and holds_a_tag(node.value)
        if modulo or formatted:
            found.append(f"{where} {ast.unparse(node)[:60]}")
    return found


def test_no_text_reaches_html_unescaped() -> None:
    assert [found for path, tree in trees().items() for found in unescaped(path, tree)] == []


def test_nothing_that_runs_what_it_shows_is_used() -> None:
    """pandas' Styler, and IPython's HTML and Markdown of a text: all of them execute what they are given."""
    for path, node in ((path, node) for path, tree in trees().items() for node in ast.walk(tree)):
        names = {alias.name.partition(".")[0] for alias in node.names} if isinstance(node, ast.Import) else set()
        names |= {alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) else set()
        assert not names & {"pandas", "Styler", "Markdown", "Javascript", "display_html", "display_markdown"}, path
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name == "HTML":  # an empty widget, whose value is checked above
                assert not node.args, f"{path}:{node.lineno}"
            if name in ("to_html", "Styler"):
                assert "escape" in {keyword.arg for keyword in node.keywords}, f"{path}:{node.lineno}"


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("def f(name):\n    return f'<b>{name}</b>'", True),
        ("def f(name):\n    return f'<b>{safe(name)}</b>'", False),
        ("def f(name):\n    text = safe(name)\n    text += name\n    return f'<b>{text}</b>'", True),
        ("def f(names):\n    rows = ''.join(f'<i>{name}</i>' for name in names)\n    return f'<b>{rows}</b>'", True),
        ("def f(names):\n    rows = ''.join(f'<i>{safe(n)}</i>' for n in names)\n    return f'<b>{rows}</b>'", False),
        ("def f(x):\n    return f'<b width={x:.1f}>'", False),
        ("def f(x):\n    return f'<b width={x:>9}>'", True),
        ("def f(x):\n    return '<b>%s</b>' % x", True),
        ("def f(x):\n    return '<b>{}</b>'.format(x)", True),
        ("def f(x):\n    return f'<b>{html.escape(x)}</b>'", True),
    ],
)
def test_the_reader_tells_the_two_apart(code: str, is_found: bool) -> None:
    assert bool(unescaped(PACKAGE / "example.py", ast.parse(code))) is is_found


@settings(max_examples=60)
@given(st.text(max_size=60))
def test_no_text_gets_through_the_one_door(text: str) -> None:
    # In Markdown a quote stands in no attribute, and its entity would be read as it is.
    for shown, quotes in ((safe(text), "\"'"), (markdown_safe(text), "")):
        assert not set(shown) & set(f"<>{quotes}\u202e\x00\x1b\u2066")
        assert not re.search(r"&(?!amp;|lt;|gt;|quot;|#x27;)", shown)
    assert len(visible("x" * (MAX_CHARACTERS + 5))) == MAX_CHARACTERS


NAMES = ("$\\foo$", "_hidden", "$", "a_b$c", "%s {x}", "\u202egnp.exe", "\x00\x1b[31m", "é" * 300, "x\ny", "", " ")


@pytest.mark.filterwarnings("ignore:constrained_layout not applied")  # beside 300 letters no room is left
@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_name_is_drawn_letter_by_letter_and_stays_in_the_legend(name: str) -> None:
    figure = losses({name: [2.0, 1.0], "other": [1.0, 2.0]})
    figure._repr_mimebundle_()
    legend = figure.axes[0].get_legend()
    assert legend is not None
    texts = legend.get_texts()
    assert texts[-1].get_text() == "other"
    if name:
        assert texts[0].get_text().lstrip() == visible(name).lstrip()
    assert not any(text.get_parse_math() for text in texts)
