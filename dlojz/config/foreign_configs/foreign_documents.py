"""Read a configuration of another program as keys and values: shell, words, YAML, TOML, JSON or Python.

Nothing of a file is executed: a script is read by `shell_words`, Python by its syntax tree, YAML by the safe loader.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from dlojz.base.contract import parse_json
from dlojz.base.errors import LabError
from dlojz.base.language import Sentences
from dlojz.base.table import visible
from dlojz.config.foreign_configs.shell_words import ShellScript, read_shell

MAX_BYTES: Final = 2**20
MOST_KEYS: Final = 5000
Form = Literal["words", "yaml", "toml", "json", "python"]
_SECRET_PARTS: Final = frozenset(
    ("token", "key", "secret", "secrets", "password", "passwd", "wandb", "credential", "credentials", "auth", "pat")
)
_SECRET_VALUE: Final = re.compile(r"\b(hf_|sk-|ghp_|gho_|AKIA|glpat-)[A-Za-z0-9_-]{8,}|://[^/\s]*:[^/\s]*@")
_INTERPOLATION: Final = re.compile(
    r"\$\{(?:multiply:(?P<factor>\d{1,6}),(?P<of>.+)|(?P<points>\.*)(?P<name>[A-Za-z_][\w.]*))\}"
)
SHOWN_CHARACTERS: Final = 40


DATA: Final = Path(__file__).with_name("data")


sentence = Sentences(DATA / "sentences.md")
"""Write a sentence about a configuration, by its key, with values in its places."""


@dataclass(frozen=True)
class ForeignDocument:
    """Keys of a file in its order, as it writes them, nested ones with points between.

    Attributes:
        form: how it is written.
        entries: keys and values; of words `--key`, a switch has the value True.
        unread: what of it was not read: undecided conditions of a script.
    """

    name: str
    form: Form
    entries: tuple[tuple[str, Any], ...]
    unread: tuple[str, ...] = ()


def read_document(path: Path) -> ForeignDocument:
    """Read a file.

    Raises:
        LabError: if it is none, empty, too large, no text, or in none of the forms.
    """
    text = _text(path)
    refusals = []
    for form in _forms(path, text):
        try:
            entries, unread = _READERS[form](text)
        except (LabError, ValueError, RecursionError) as error:
            refusals.append(f"{form}: {str(error).splitlines()[0].rstrip('.')}" if str(error) else form)
            continue
        if len(entries) > MOST_KEYS:
            raise LabError(sentence("too_many_keys", file=visible(path.name), most=MOST_KEYS))
        if entries:
            return ForeignDocument(visible(path.name), form, tuple(entries), tuple(unread))
        refusals.append(form + ": " + sentence("no_key"))
    raise LabError(sentence("no_form", file=visible(path.name), why="; ".join(refusals)))


def _text(path: Path) -> str:
    try:
        if path.is_dir():
            raise LabError(sentence("folder", file=visible(path.name)))
        if path.stat().st_size > MAX_BYTES:
            raise LabError(sentence("too_large", file=visible(path.name), most=MAX_BYTES))
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or sentence("no_text")
        raise LabError(sentence("unreadable", file=visible(path.name), why=reason)) from None
    if "\0" in text:
        raise LabError(sentence("unreadable", file=visible(path.name), why=sentence("no_text")))
    if not text.strip():
        raise LabError(sentence("empty", file=visible(path.name)))
    return text


def _forms(path: Path, text: str) -> tuple[Form, ...]:
    """Order the forms in which a text is tried: that of its ending first, else by how it begins."""
    by_ending: dict[str, Form] = {
        ".json": "json", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".py": "python", ".sh": "words",
        ".bash": "words", ".slurm": "words", ".sbatch": "words",
    }  # fmt: skip
    if (form := by_ending.get(path.suffix.lower())) is not None:
        return (form,)
    if text.lstrip().startswith("{"):
        return ("json", "yaml")
    # Words in a line that begins so, or a script; a YAML document may begin with `---`.
    words = text.startswith("#!") or re.search(r"(?m)(^|[\s\"'(])--[A-Za-z]", text) is not None
    return ("words", "yaml", "toml") if words else ("toml", "yaml", "words")


Entries = tuple[list[tuple[str, Any]], list[str]]


def _flat(content: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield keys with points between, and their values; lists stay whole."""
    stack, count = [(prefix, content)], 0
    # Counted, as shared parts of a YAML file may repeat one another without end.
    while stack and count <= 4 * MOST_KEYS:
        key, value = stack.pop()
        count += 1
        if isinstance(value, Mapping):
            stack += [(f"{key}.{name}" if key else str(name), inner) for name, inner in reversed([*value.items()])]
        else:
            yield key, value


def _json(text: str) -> Entries:
    content = parse_json(text)
    if not isinstance(content, dict):
        raise ValueError(sentence("no_key"))
    return list(_flat(content)), []


def _toml(text: str) -> Entries:
    return list(_flat(tomllib.loads(text))), []


def _yaml(text: str) -> Entries:
    import yaml

    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:  # among them tags that would build objects, and several documents
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise ValueError(str(getattr(error, "problem", None) or error) + line) from None
    if not isinstance(content, dict):
        raise ValueError(sentence("no_key"))
    entries = list(_flat(content))
    values = dict(entries)
    return [(key, _interpolated(key, value, values)) for key, value in entries], []


def _interpolated(key: str, value: Any, entries: dict[str, Any], depth: int = 0) -> Any:
    """Replace `${.hidden_size}`, `${model.hidden_size}` and NeMo's `${multiply:4, …}`; an unknown one stays."""
    if depth > 8 or not isinstance(value, str) or not (match := _INTERPOLATION.fullmatch(value.strip())):
        return value
    if match["factor"]:
        factor = _interpolated(key, match["of"].strip(), entries, depth + 1)
        return int(match["factor"]) * factor if type(factor) is int and abs(factor) < 2**40 else value
    # One point is of the section that the key is in, each further one of the section around it.
    sections = key.split(".")[: -len(match["points"])] if match["points"] else []
    name = ".".join([*sections, match["name"]])
    return _interpolated(name, entries[name], entries, depth + 1) if name in entries else value


def _python(text: str) -> Entries:
    """Read the keywords of the first call that is made of calls, as in `JobConfig(training=Training(steps=10))`."""

    def keywords(call: ast.Call, prefix: str) -> Iterator[tuple[str, Any]]:
        for keyword in call.keywords:
            key, value = f"{prefix}{keyword.arg}", keyword.value
            if isinstance(value, ast.Call) and value.keywords:
                yield from keywords(value, key + ".")
            elif isinstance(value, ast.Call) and len(value.args) == 1:
                yield key, _literal(value.args[0])
            elif not isinstance(value, ast.Call):
                yield key, _literal(value)

    calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    nested = next((c for c in calls if any(isinstance(keyword.value, ast.Call) for keyword in c.keywords)), None)
    return ([], []) if nested is None else (list(keywords(nested, "")), [])


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return f"${ast.unparse(node)}"  # as a variable of a script that is assigned nowhere


_NO_DECODER: Final = re.compile(r"\bpretrain_(bert|t5|mamba|retro|vlm|ict|vision_\w+)\.py\b")
"""Megatron-LM's programs of models that are no decoders, whose options look like a decoder's."""


def _words(text: str) -> Entries:
    """Read the options of the training's command of a script, or of a list of words."""
    script = read_shell(text)
    commands = script.commands
    if not script.variables and sum(bool(_options(command)) for command in commands) != 1:
        commands = [[word for command in commands for word in command]]  # a list of words, over several lines
    # Of what a variable holds too, where another script makes the command of it.
    options = [_options(words) for words in (*commands, *map(str.split, script.variables.values()))]
    programs = [("#program", match[1]) for words in commands for word in words if (match := _NO_DECODER.search(word))]
    return [*max(options, key=len, default=[]), *programs, *_surroundings(script)], script.unread


def _surroundings(script: ShellScript) -> list[tuple[str, Any]]:
    counts = ("WORLD_SIZE", "NNODES", "NUM_NODES", "GPUS_PER_NODE", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES")
    names = [name for name in counts if name in script.variables]
    return [(f"#SBATCH {name}", value) for name, value in script.batch.items()] + [
        (f"${name}", script.variables[name]) for name in names
    ]


def _options(words: list[str]) -> list[tuple[str, Any]]:
    """Pair options with what follows them: nothing (True), one word, or several."""
    options: dict[str, list[str]] = {}
    current: list[str] = []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.partition("=")
            # The last of equal options holds, as with argparse; a value after `=` is complete.
            options[name] = current = [value] if equals else []
            current = [] if equals else current
        elif word.endswith(".py") or word == "-m":
            current = []  # the program: no value of the launcher's last option
        else:
            current.append(word)
    return [
        (name, True if not values else values[0] if len(values) == 1 else values) for name, values in options.items()
    ]


_READERS: Final[dict[Form, Callable[[str], Entries]]] = {
    "words": _words, "yaml": _yaml, "toml": _toml, "json": _json, "python": _python,
}  # fmt: skip


def shown_value(key: str, value: Any) -> str:
    """Write a value to be shown: short, without control marks, hidden where the key or the value may be a secret."""
    secret = _SECRET_PARTS & set(re.split(r"[^a-z]+", key.lower())) and isinstance(value, str) and not value.isdigit()
    # Of a list of lists, which shared parts of a YAML file make without end, only the length is written.
    nested = isinstance(value, list) and (len(value) > 8 or any(isinstance(item, list | dict) for item in value))
    text = f"[{len(value)}]" if nested else str(value).lower() if isinstance(value, bool) else str(value)
    text = "" if value is True and key.startswith("--") else text  # a switch is written without a value
    if (secret and text) or _SECRET_VALUE.search(text):
        return sentence("hidden")
    text = " ".join(text[: 4 * SHOWN_CHARACTERS].split())
    return visible(text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…")
