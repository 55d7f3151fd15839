"""Read the words of a launch script without running it: its variables, arrays, continuations and simple conditions.

Nothing is executed and no variable comes from the environment: what the script does not assign stays as it is written
(`$DATA_PATH`). Of `if`, a test of texts or numbers is decided where both sides are known; bodies of loops, of `case`
and of undecided conditions are left unread, and said to be.

Source: GNU Bash manual, "Shell Syntax" and "Shell Expansions", as far as launch scripts need them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

_TOKEN: Final = re.compile(
    r"""(?P<space>(?:[ \t\r]|\\\r?\n)+) | (?P<comment>\#[^\n]*) | <<-?[ ]*["']?(?P<here>\w+)["']?
    | (?P<operator>\n|;;|;|&&|\|\||[&|()]) | (?P<redirect>\d?[<>]+&?\d?)
    | (?P<word>(?:\\[^\n] | '[^']*' | "(?:\\.|\$\([^()]*\)|[^"\\])*" | \$\(\((?:[^()]|\([^()]*\))*\)\) | \$\([^()]*\)
      | `[^`]*` | \$\{(?:[^{}]|\$\{[^{}]*\})*\} | [^\s\\'"`;&|()<>])+) | (?P<stray>.)""",
    re.VERBOSE | re.DOTALL,
)
_ASSIGNMENT: Final = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE: Final = re.compile(
    r"\$\(\((?P<sum>(?:[^()]|\([^()]*\))*)\)\) | \$\{(?P<braced>\w+)(?:\[[@*]\])?"
    r"(?::?(?P<kind>[-=])(?P<default>(?:[^{}]|\$\{[^{}]*\})*))?\} | \$(?P<bare>[A-Za-z_]\w*|\d)"
    r"| (?P<arguments>\$[@*]|\$\{[@*](?::[\d:\ ]*)?\})",
    re.VERBOSE,
)
_SBATCH: Final = re.compile(r"^#SBATCH\s+--?([\w-]+)[= ]+(\S+)", re.MULTILINE)
MOST_DIGITS = 12
"""Digits of a number that arithmetic is done with."""


@dataclass
class ShellScript:
    """Commands of a script, their variables replaced.

    Attributes:
        commands: words of each command.
        variables: values of what the script assigns; an array's are joined by blanks.
        batch: options of `#SBATCH` lines.
        unread: beginnings of conditions and loops that were not decided.
    """

    commands: list[list[str]] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    batch: dict[str, str] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)

    def value(self, text: str) -> str:
        """Replace the variables of a text and take its quotes away; what is assigned nowhere stays as written."""
        parts = re.split(r"('[^']*')", text.replace("\\\n", " "))
        # Between single quotes nothing is replaced.
        replaced = (part if part.startswith("'") else _VARIABLE.sub(self._replaced, part) for part in parts)
        return re.sub(r"\\(.)", r"\1", re.sub(r"[\"']", "", "".join(replaced)))

    def _replaced(self, match: re.Match[str]) -> str:
        if match["arguments"]:
            return ""  # of the script, started without any
        if match["sum"] is not None:
            result = arithmetic(
                re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda name: self._of(name[1], name[0]), match["sum"])
            )
            return match[0] if result is None else str(result)
        name, default = match["braced"] or match["bare"], match["default"]
        text = self._of(name, match[0] if default is None else self.value(default))
        if match["kind"] == "=":  # `: "${NODES:=4}"` assigns it too
            self.variables.setdefault(name, text)
        return text

    def _of(self, name: str, otherwise: str) -> str:
        return self.variables.get(name, otherwise)


def arithmetic(expression: str) -> int | None:
    """Compute a sum of whole numbers, `8 * (2 + 1)`; None where it is none, or one of its names is unknown."""
    operations: dict[type[ast.operator], Callable[[int, int], int]] = {
        ast.Add: int.__add__, ast.Sub: int.__sub__, ast.Mult: int.__mul__, ast.Div: int.__floordiv__,
        ast.Mod: int.__mod__,
    }  # fmt: skip

    def computed(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in operations:
            return operations[type(node.op)](computed(node.left), computed(node.right))
        raise ValueError(expression)

    # The pattern keeps numbers short, so that no product is beyond reason.
    if len(expression) > 200 or re.search(rf"\d{{{MOST_DIGITS + 1}}}|[^\d\s+*/%()-]", expression):
        return None
    try:
        return computed(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _statements(text: str) -> Iterator[tuple[str, list[str], bool]]:
    """Yield statements: the operator before each, its words as written, and whether it is what an array holds."""
    words: list[str] = []
    operator, skipped, in_array, position = "\n", False, False, 0
    while (match := _TOKEN.match(text, position)) is not None:
        position, kind = match.end(), match.lastgroup
        if kind == "here":  # a text up to a line that is its mark
            end = re.compile(rf"^\s*{re.escape(match['here'])}\s*$", re.MULTILINE).search(text, position)
            position = end.end() if end else len(text)
        elif kind == "redirect":
            skipped = True  # the file after it is no word
        elif kind == "operator" and match[0] == "(" and words and re.fullmatch(r"\w+\+?=", words[-1]):
            in_array = True
        elif kind == "operator" and in_array:
            if match[0] == ")":
                yield operator, words, True
                words, in_array, operator = [], False, ";"
        elif kind == "operator":
            if words:
                yield operator, words, False
            words, operator, skipped = [], match[0], False
        elif kind in ("word", "stray"):
            words += [] if skipped else [match[0]]
            skipped = False
    if words:
        yield operator, words, in_array


class _Conditions:
    """Which statements are reached: a stack of conditions, each true, false or (None) not decided."""

    def __init__(self, script: ShellScript) -> None:
        self.script, self.stack, self.tested = script, list[bool | None](), False

    def reached(self) -> bool:
        """Whether the statements that follow are certain to be executed."""
        return all(condition is True for condition in self.stack) and not self.tested

    def body(self, operator: str, words: list[str]) -> list[str]:
        """Take the words of control out of a statement; returns what is left of it to do."""
        while words and (word := words[0]) in _CONTROL:
            words = words[1:]
            if word in ("if", "elif"):
                if word == "elif":
                    # Where a branch before it was taken, this one is not.
                    before = self.stack.pop() if self.stack else None
                    decided = self._test(words) if before is False else (False if before else None)
                    self.stack.append(decided)
                else:
                    self.stack.append(self._test(words))
                self.tested = True
                return []
            if word == "then":
                self.tested = False
            elif word == "else" and self.stack:
                self.stack[-1] = None if self.stack[-1] is None else not self.stack[-1]
            elif word in ("for", "while", "until", "case", "select"):
                self.stack.append(None)
                self._undecided([word, *words])
                return []
            elif word in ("fi", "done", "esac") and self.stack:
                self.stack.pop()
        if self.tested and self.stack and words:  # one more test of a condition, after && or ||
            before, after = self.stack[-1], self._test(words)
            decisive = operator == "||"  # what settles it: one that holds, or with && one that does not
            self.stack[-1] = decisive if decisive in (before, after) else None if None in (before, after) else before
            return []
        return words

    def _test(self, words: list[str]) -> bool | None:
        """Decide a test `[[ "$A" == "b" ]]`; None where one of its values is not known."""
        values = [self.script.value(word) for word in words if word not in ("[", "[[", "]", "]]")]
        negated, values = values[:1] == ["!"], values[1:] if values[:1] == ["!"] else values
        result: bool | None = None
        if len(values) == 2 and values[0] in ("-n", "-z"):
            # What the script assigns nowhere is empty here: the environment is not read.
            result = (values[1] == "" or values[1].startswith("$")) == (values[0] == "-z")
        elif len(values) == 3 and values[1] in _COMPARED and not any(value.startswith("$") for value in values):
            first, second = values[0], values[2]
            if values[1].startswith("-") and not (first.isdecimal() and second.isdecimal()):
                return None
            key = int if values[1].startswith("-") else str
            result = _COMPARED[values[1]](key(first), key(second))
        if result is None:
            self._undecided(["if", *words])
            return None
        return result != negated

    def _undecided(self, words: list[str]) -> None:
        self.script.unread.append(" ".join(words)[:60])


_CONTROL: Final = frozenset(
    (
        "if",
        "then",
        "elif",
        "else",
        "fi",
        "for",
        "while",
        "until",
        "do",
        "done",
        "case",
        "esac",
        "select",
        "{",
        "}",
        "function",
    )
)
_COMPARED: Final[dict[str, Callable[..., bool]]] = {
    "==": lambda a, b: a == b, "=": lambda a, b: a == b, "!=": lambda a, b: a != b, "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b, "-gt": lambda a, b: a > b, "-ge": lambda a, b: a >= b, "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
}  # fmt: skip
_BATCH_VARIABLES: Final = {"nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), "N": ("SLURM_NNODES",)}


def read_shell(text: str) -> ShellScript:
    """Read a script: what its commands are made of, as far as it says so itself."""
    script = ShellScript(batch=dict(_SBATCH.findall(text)))
    for option in ("gres", "gpus-per-node"):  # `gpu:a100:8`, `a100:8`
        if number := re.search(r"(?:^|gpu|:)(\d+)$", script.batch.get(option, "")):
            script.batch["gpus-per-node"] = number[1]
    for option, names in _BATCH_VARIABLES.items():
        script.variables |= dict.fromkeys(names, script.batch[option]) if option in script.batch else {}
    conditions = _Conditions(script)
    for operator, statement, is_array in _statements(text):
        words = conditions.body(operator, statement)
        if not words or not conditions.reached():
            continue
        while words and words[0] in ("export", "local", "declare", "readonly", "-r", "-a", "-x"):
            words = words[1:]
        if (
            is_array
            and (assigned := next((i for i, word in enumerate(words) if _ASSIGNMENT.fullmatch(word)), None)) is not None
        ):
            _assign(script, words[assigned], " ".join(map(script.value, words[assigned + 1 :])))
            continue
        while words and (match := _ASSIGNMENT.fullmatch(words[0])):
            _assign(script, words[0], script.value(match[3]))
            words = words[1:]
        if words:
            script.commands.append([part for word in words for part in script.value(word).split()])
    return script


def _assign(script: ShellScript, word: str, value: str) -> None:
    match = _ASSIGNMENT.fullmatch(word)
    assert match is not None
    name, added, _ = match.groups()
    if len(value) < 2**16:  # a text that doubles itself stays below a file's own size
        separator = " " if value.startswith("--") or " --" in value else ""
        script.variables[name] = script.variables.get(name, "") + separator + value if added else value
