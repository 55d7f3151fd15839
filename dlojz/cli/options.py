"""Read the options of a command from text, parse its words to values, show its help, answer as text or as JSON.

An option is one line of text, with its help in both languages:

    --name METAVAR = DEFAULT  help in English // aide en français

`METAVAR` is missing for a switch. `INT>=1<=50` and `FLOAT` are parsed as numbers, 0 or more where nothing else is said,
and `NUMBER` as one of any size; `TEXT...` may be given several times. Other spellings stand before the name
(`-b --batch-size`), what stands alone on the command line has no name (`RUN  name of a run // nom d’une exécution`),
and an indented line continues the one before.

What a command does, in paragraphs in both languages, its examples and its options, one on a line, stand in
`data/MODULE.md`, under `# NAME`; `{json}` is the set of that name in `data/options.txt`, as far as the command does not
say what stands there.

With `--json`, stdout carries exactly one JSON document whatever any library prints: file descriptor 1 leads to stderr
while the work is done.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import re
import shlex
import sys
import textwrap
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, TypeAlias

from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from dlojz.base.errors import LabError
from dlojz.base.language import Sentences, one_of, say
from dlojz.base.table import visible

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from dlojz.config.fields import ConfigSubject
    from dlojz.config.run_config import RunConfig
    from dlojz.hardware import Device

phrase = Sentences(Path(__file__).parent / "data" / "sentences.md", visible=visible)
"""Writes what the commands say beside their tables."""

WORDS, REST = "words", "rest"
"""Names under which the words that stand alone are given, and those after `--`."""
WIDEST_NAME = 27
"""Columns of an option in the help; a longer one is folded."""
NUMBERS: Final[dict[str, type[int] | type[float]]] = {"INT": int, "FLOAT": float}
"""Metavars whose values are numbers."""
FRAME = 6
"""Columns of a panel beside its two texts: borders, and the spaces within."""
HELP_WORDS = frozenset({"-h", "--help", "--help-all"})
"""Words that ask for the help; `--help-all` for every option."""
LONG_HELP = 40
"""Options from which on `--help` shows the everyday ones alone."""
EVERYDAY = frozenset(
    {WORDS, REST, "nproc", "parity", "on", "machine", "account", "hours", "script", "fit", "budget", "png", "json"}
    | {"from", "model", "sequence_length", "data", "steps", "device", "optimizer", "learning_rate", "precision"}
    | {"snapshot", "dp", "tp", "pp", "zero", "engine", "schedule", "micro_batch", "micro_batches", "checkpointing"}
    | {"lora"}
)
"""Names of the everyday options, of all verbs: what the README and the labs use most, and all that an example uses."""


@dataclass(frozen=True)
class Flag:
    """One option: `--name VALUE`, a switch `--name`, or the words that stand alone.

    Args:
        name: key of its value.
        metavar: what the help shows for the value; empty for a switch.
        default: value where it is not given.
        least, most: smallest and largest legal number.
        kind: `repeated` may be given several times; `rest` is all after `--`, as it stands; a `field` of a
            configuration refuses its values by itself.
        spellings: how it is written; the help shows all but one of two that differ in `_` and `-` alone.
        subject: heading of the help that it stands under; None for the command's own options.
    """

    name: str
    en: str
    fr: str
    metavar: str = ""
    default: Any = None
    least: float = 0
    most: float = math.inf
    kind: Literal["value", "switch", "words", "repeated", "rest", "field"] = "value"
    spellings: tuple[str, ...] = ()
    subject: ConfigSubject | None = None

    @property
    def option(self) -> str:
        """How it is written on the command line."""
        return self.spellings[-1]

    def value(self, word: str) -> Any:
        """Parse a word of the command line.

        Raises:
            LabError: if it is no number where one is needed, or too small a one.
        """
        if self.metavar == "NUMBER":
            return _parsed(self.option, word, float)
        kind = NUMBERS.get(self.metavar)
        if self.kind == "field":
            return _typed(word, kind)
        return word if kind is None else number(self.option, word, kind, self.least, self.most)


_FLAG = re.compile(
    r"(?P<spellings>(-\S+ )*--[\w-]+)? ?(?P<metavar>.*?)(>=(?P<least>[\d.]+))?(<=(?P<most>[\d.]+))?"
    r"( = (?P<default>\S*))?",
    re.DOTALL,
)


def flags(text: str) -> tuple[Flag, ...]:
    """Read options from their text (see the module's docstring)."""
    blocks = re.sub(r"\n\s+", " ", textwrap.dedent(text).strip()).splitlines()
    return tuple(_flag(block) for block in blocks)


def _flag(block: str) -> Flag:
    head, _, help_text = block.partition("  ")
    en, _, fr = help_text.partition(" // ")
    match = _FLAG.fullmatch(head)
    assert match is not None, block
    metavar, spellings = match["metavar"], tuple((match["spellings"] or "").split())
    kind: Literal["value", "switch", "words", "repeated", "rest"] = "value" if metavar else "switch"
    if not spellings:
        kind = "words"
        if metavar.startswith("-- "):
            kind, metavar = "rest", metavar.removeprefix("-- ")
    elif metavar.endswith("..."):
        kind, metavar = "repeated", metavar.removesuffix("...")
    name = spellings[-1].removeprefix("--").replace("-", "_") if spellings else REST if kind == "rest" else WORDS
    default: Any = {"switch": False, "words": (), "repeated": (), "rest": ()}.get(kind, match["default"])
    minimum, maximum = float(match["least"] or 0), float(match["most"] or math.inf)
    flag = Flag(name, en, fr or en, metavar, None, minimum, maximum, kind, spellings)
    # A default is parsed like a word of the command line, so that it has the option's type.
    return replace(flag, default=flag.value(default) if isinstance(default, str) else default)


@cache
def shared_flags() -> dict[str, tuple[Flag, ...]]:
    """Read the options that several commands have, by the name of their set in `data/options.txt`."""
    text = (Path(__file__).parent / "data" / "options.txt").read_text(encoding="utf-8")
    return {name: flags(lines) for name, _, lines in (block.partition("\n") for block in text.split("# ")[1:])}


def config_flags(*names: str, **defaults: object) -> tuple[Flag, ...]:
    """Make one option for each field of `RunConfig` and `Layout`, in the order of their subjects.

    Args:
        names: fields; all of them by default.
        defaults: defaults that the command has instead of the configuration's.
    """
    from dlojz.config.fields import SUBJECTS

    options = [
        _flag_of(name, field, subject)
        for subject in SUBJECTS
        for name, field in subject.fields.model_fields.items()
        if not names or name in names
    ]
    # A default of the command stands in the help, and for an option that is not given.
    return tuple(replace(flag, default=defaults.get(flag.name, flag.default)) for flag in options)


def predicting_flags() -> tuple[Flag, ...]:
    """`config_flags`, with a `--device` that takes the name of a GPU."""
    from dlojz.hardware import DEVICES

    shared = shared_flags()
    gpu = replace(shared["gpu"][0], metavar="|".join((*DEVICES, "24GiB", "FILE")))
    changed = (replace(gpu, subject=flag.subject) if flag.name == "device" else flag for flag in config_flags())
    return (*changed, *shared["compiled"])


def _flag_of(name: str, field: FieldInfo, subject: ConfigSubject) -> Flag:
    from dlojz.config.fields import HELP

    kinds = _kinds(field)
    choices = [value for kind in kinds if typing.get_origin(kind) is Literal for value in typing.get_args(kind)]
    metavar = "|".join(choices) or ("INT" if int in kinds else "FLOAT" if float in kinds else "TEXT")
    spellings = (option_of(name),)
    flag = Flag(name, *HELP.pairs[name], metavar, field.default, kind="field", spellings=spellings, subject=subject)
    return replace(flag, metavar="", kind="switch") if bool in kinds else flag


def _kinds(field: FieldInfo) -> tuple[Any, ...]:
    """List the types that a field takes."""
    # Of an optional field (`int | None`), every member of the union.
    union = typing.get_origin(field.annotation) in (typing.Union, UnionType)
    return typing.get_args(field.annotation) if union else (field.annotation,)


def _typed(word: str, kind: type[int] | type[float] | None) -> Any:
    """Parse a number; anything else is left to its field to refuse."""
    with contextlib.suppress(ValueError):
        return kind(word) if kind else word
    return word


def number(
    option: str, word: str, kind: type[int] | type[float] = int, least: float = 0, most: float = math.inf
) -> Any:
    """Parse a number.

    Raises:
        LabError: if it is no number of this kind, smaller than `least` or larger than `most`.
    """
    value = _parsed(option, word, kind)
    if not least <= value < math.inf:
        raise LabError(phrase("number too small", option=option, least=least, word=word))
    if value > most:
        raise LabError(phrase("number too large", option=option, most=most, word=word))
    return value


def _parsed(option: str, word: str, kind: type[int] | type[float]) -> int | float:
    try:
        return kind(word)
    except ValueError:
        raise LabError(phrase("no number", option=option, word=word)) from None


class Given(dict[str, Any]):
    """Values of the options that were given, by name; `given[name]` of another one is its default."""

    def __init__(self, values: dict[str, Any], defaults: dict[str, Any]) -> None:
        super().__init__(values)
        self.defaults = defaults

    def __missing__(self, name: str) -> Any:
        return self.defaults[name]


def parse(command: str, options: Sequence[Flag], words: Sequence[str]) -> Given:
    """Parse the words of a command line.

    Raises:
        LabError: for an unknown option, one without its value, a value that is no number where one is needed, or a
            word too many.
    """
    script_words: tuple[str, ...] | None = None
    # argparse would take the words after `--` for its own: they are cut off first, where a script may get them.
    if "--" in words and any(flag.kind == "rest" for flag in options):
        words, script_words = words[: words.index("--")], tuple(words[words.index("--") + 1 :])
    # No abbreviations: a new option would make an old one ambiguous.
    parser = argparse.ArgumentParser(command, add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in options:
        if flag.kind == "rest":
            continue
        if flag.kind == "words":
            # SUPPRESS: an option that is not given has no attribute, so that it can be told from its default.
            parser.add_argument(WORDS, nargs="*", default=argparse.SUPPRESS)
        elif flag.kind == "switch":
            parser.add_argument(*flag.spellings, dest=flag.name, action="store_true", default=argparse.SUPPRESS)
        else:
            action = "append" if flag.kind == "repeated" else "store"
            parser.add_argument(*flag.spellings, dest=flag.name, action=action, default=argparse.SUPPRESS)
    # --micro_batch is --micro-batch; a value after `=` is left as it is.
    spelled = [re.sub(r"^--[\w-]+", lambda name: name[0].replace("_", "-"), word) for word in words]
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            # Intermixed: words that stand alone may come before, between and after options.
            namespace, unknown = parser.parse_known_intermixed_args(spelled)
    except argparse.ArgumentError as error:
        raise LabError(_no_value(command, options, str(error.argument_name))) from None
    if unknown:
        # The sentence quotes the word as it was typed.
        stray = dict(zip(spelled, words, strict=True)).get(unknown[0], unknown[0])
        _refuse_words_of_script(command, options, words, stray)
        raise LabError(_unknown(command, options, stray))
    words_of = ((flag, getattr(namespace, flag.name, None)) for flag in options)
    # argparse gives [] where no word stands alone.
    values = {flag.name: _value(flag, word) for flag, word in words_of if word not in (None, [])}
    for flag in options:
        if flag.kind == "words":
            positionals = values.get(WORDS, ())
            _refuse_words_of_script(command, options, words, positionals[1] if len(positionals) > 1 else None)
            _check_words(command, flag, positionals)
    if script_words is not None:
        values[REST] = script_words
    return Given(values, {flag.name: flag.default for flag in options})


def _refuse_words_of_script(command: str, options: Sequence[Flag], words: Sequence[str], unknown: str | None) -> None:
    """Refuse a word that is meant for a script, with the command line that gives it to the script."""
    script_index = next((number for number, word in enumerate(words) if word.endswith(".py") or word == "-m"), None)
    if unknown is None or script_index is None or all(flag.kind != "rest" for flag in options):
        return
    start = words.index(unknown, script_index) if unknown in words[script_index:] else script_index
    before = [
        word
        for number, word in enumerate(words)
        if number < start or number < script_index + (words[script_index] == "-m")
    ]
    command_line = shlex.join(["dlojz", command.removeprefix("dlojz "), *before, "--", *words[start:]])
    raise LabError(phrase("words of a script", unknown=unknown, command=command, command_line=command_line))


def _check_words(command: str, flag: Flag, words: Sequence[str]) -> None:
    """Refuse other words than the metavar names: `A B` is two, `[A]` may be left out, `[A…]` are any number."""
    names = flag.metavar.split()
    maximum = 10**6 if "…" in flag.metavar else len(names)
    minimum = sum(not name.startswith("[") for name in names)
    if not minimum <= len(words) <= maximum:
        written = repr(" ".join(words))
        en, fr = (written, f"{written} ") if words else ("nothing", "rien n’")
        raise LabError(phrase("words received", command=command, flag=flag, en=en, fr=fr))


def _value(flag: Flag, word: Any) -> Any:
    return tuple(word) if isinstance(word, list) else word if word is True else flag.value(word)


def _unknown(command: str, options: Sequence[Flag], word: str) -> str:
    legal = [*(flag.option for flag in options if flag.spellings), "--help", "--help-all"]
    if word.startswith("-"):
        return one_of(say(en=f"flag of `{command}`", fr=f"option de `{command}`"), word.partition("=")[0], legal)
    return phrase("unknown word", command=command, word=word, legal=", ".join(legal))


def _no_value(command: str, options: Sequence[Flag], spellings: str) -> str:
    flag = next(flag for flag in options if "/".join(flag.spellings) == spellings)
    if flag.kind == "switch":
        return phrase("no value taken", flag=flag, command=command)
    return phrase("value needed", flag=flag)


def take_model(args: dict[str, Any]) -> None:
    """Move a model that is named without `--model` to that option.

    Raises:
        LabError: if two models are named.
    """
    model_names = dict.fromkeys((*args.pop(WORDS, ()), *((args["model"],) if "model" in args else ())))
    if len(model_names) > 1:
        raise LabError(phrase("several models", received=", ".join(map(repr, model_names))))
    if model_names:
        args["model"] = next(iter(model_names))


def config_of(args: dict[str, Any], **otherwise: object) -> RunConfig:
    """Configure the run that was asked for; a verb that takes `MODEL` may name the model without `--model`.

    Args:
        args: options, those of a configuration among them.
        otherwise: fields where they are not given.

    Raises:
        LabError: if it is not legal, or two models are named.
    """
    from dlojz.config.layout import Layout
    from dlojz.config.run_config import HIDDEN, RunConfig

    args = {**args}
    take_model(args)
    fields = {*RunConfig.model_fields, *Layout.model_fields} - set(HIDDEN)
    return RunConfig.of(**otherwise | {name: value for name, value in args.items() if name in fields})


def target_device(args: Given) -> Device | None:
    """Take the GPU that `--device` names out of the options; None for the CPU or where none is named.

    What a run calls its device (auto, cpu, cuda) stays where it is.

    Raises:
        LabError: for a name that is no device's; the sentence lists those there are.
    """
    from dlojz.config.fields import RunFields
    from dlojz.hardware import device

    if args.get("device") in (None, *typing.get_args(RunFields.model_fields["device"].annotation)):
        return None
    return device(args.pop("device"))


def assumed_fields(args: Given, target: Device | None) -> dict[str, Any]:
    """Choose what a question about a text model on a GPU leaves open: 16-bit precision, one sample of usual length.

    A program of a library keeps its one precision. On the CPU, where the lab runs, and for a model in one's own file,
    a configuration's defaults hold.

    Args:
        args: options.
        target: the GPU; None for the CPU.

    Returns:
        `precision` (bf16, or fp16 where the GPU has no bf16), `micro_batch` and `sequence_length`, without those that
        were given.

    Raises:
        LabError: if there is no such model.
    """
    from dlojz import models
    from dlojz.config.fields import RunFields
    from dlojz.models.foreign.elsewhere import is_own_file

    name = next(iter(args.get(WORDS, ())), args.get("model", RunFields.model_fields["model"].default))
    # `models.spec` comes last: it refuses an unknown model, which only a question about a GPU needs to know here.
    if target is None or is_own_file(str(name)) or (spec := models.spec(name)).family != "text":
        return {}
    usual: dict[str, Any] = {"micro_batch": 1, "sequence_length": spec.sequence_length}
    if args.get("library", "none") == "none":
        usual["precision"] = "fp16" if target.peak_flops and "bf16" not in target.peak_flops else "bf16"
    return {field: value for field, value in usual.items() if field not in args}


def scheduler_of(args: Given) -> dict[str, Any]:
    """Choose the options of the scheduler that were given."""
    return {flag.name: args[flag.name] for flag in shared_flags()["scheduler"] if args.get(flag.name)}


def check_needs(args: Given, name: str, *requirements: str) -> None:
    """Refuse an option that has no effect without one of some others.

    Raises:
        LabError: naming what it needs.
    """
    if name in args and not any(args[requirement] for requirement in requirements):
        option, option_names = option_of(name), [option_of(requirement) for requirement in requirements]
        en, fr = " or ".join(option_names), " ou ".join(option_names)
        raise LabError(phrase("needs another option", option=option, en=en, fr=fr))


def option_of(name: str) -> str:
    """Write the option of a name: `micro_batch` → `--micro-batch`."""
    return "--" + name.replace("_", "-")


def check_writable(args: Given, pictures: Sequence[str], files: Sequence[str] = ()) -> None:
    """Refuse a picture or a file that could not be written, before minutes are spent on it.

    Args:
        pictures: names of those that name a picture, which is written in place.
        files: names of those that name another file, which is replaced.

    Raises:
        LabError: for an ending that is no picture's, a folder, or a place that may not be written to.
        OSError: for a folder that cannot be made.
    """
    for name in (name for name in (*pictures, *files) if args[name]):
        word, path = args[name], Path(args[name]).expanduser().absolute()
        if name in pictures and path.suffix.lower() not in (".png", ".svg", ".pdf"):
            raise LabError(phrase("no picture", name=name, word=word))
        if path.is_dir():
            raise LabError(phrase("folder in place of a file", name=name, word=word))
        path.parent.mkdir(parents=True, exist_ok=True)
        # A picture is written in place; any other file is replaced, for which its folder must be writable.
        if not os.access(path if name in pictures and path.exists() else path.parent, os.W_OK):
            raise LabError(phrase("read-only", name=name, word=word))


def fields_of(source: object, *names: str) -> dict[str, Any]:
    """Read some fields of an object, for a JSON document."""
    return {name: getattr(source, name) for name in names}


class Answer(Protocol):
    """Show something: a JSON document, what rich prints, or the sentence in the reader's language."""

    def __call__(self, content: Any = None, *, en: str = "", fr: str = "") -> None: ...


class HelpText(NamedTuple):
    """Description of a command in both languages, in paragraphs, its examples, and its options.

    An example is a command line, with a remark in both languages where it needs one (`# english // français`).
    """

    en: str
    fr: str
    examples: str
    options: str


@cache
def help_texts(module: str) -> dict[str, HelpText]:
    """Read the help of the commands of a module of this room, by name.

    Each stands under `# NAME`: paragraphs, each `- English`, then `- français`; the examples, indented; the options.
    """
    texts = (Path(__file__).parent / "data" / f"{module}.md").read_text(encoding="utf-8")
    helps = {}
    for section in re.split(r"^# ", texts, flags=re.MULTILINE)[1:]:
        name, *paragraphs, examples, options = section.strip().split("\n\n")
        pairs = (paragraph.removeprefix("- ").split("\n- ") for paragraph in paragraphs)
        en, fr = map("\n\n".join, zip(*pairs, strict=True))
        helps[name] = HelpText(en, fr, examples, options)
    return helps


Values: TypeAlias = str | int | Iterable[Flag] | Callable[[], Iterable[Flag]]
"""What a name in braces stands for in the text of a command's options."""


@dataclass(frozen=True)
class Verb:
    """One command: its options, its help, and what it does.

    Args:
        name: after `dlojz`.
        run: does it, with the values of its options and the one function that answers; returns the exit code, None
            for 0.
        values: what `{NAME}` stands for in the text of its options: words, or, alone on a line, options that are made
            already, or made when the command is called, so that another command of its module loads nothing for them.
    """

    name: str
    run: Callable[[Given, Answer], int | None]
    values: Mapping[str, Values] = field(default_factory=dict)

    @property
    def text(self) -> HelpText:
        """Its help."""
        return help_texts(self.run.__module__.rpartition(".")[2])[self.name]

    @cached_property
    def options(self) -> tuple[Flag, ...]:
        """Its options, in the order of the help."""
        made: dict[str, Values] = {
            "config": config_flags,
            "predicting": predicting_flags,
            **shared_flags(),
            **self.values,
        }
        options: list[Flag] = []
        for line in self.text.options.splitlines():
            value = made.get(line.strip("{}"), "")
            if isinstance(value, str | int):
                options += flags(re.sub(r"\{(\w+)\}", lambda name: str(made[name[1]]), line))
            else:
                options += value() if callable(value) else value
        return tuple(options)

    @cached_property
    def spelled(self) -> frozenset[str]:
        """How its options are written."""
        return frozenset(spelling for flag in self.options for spelling in flag.spellings)

    def __call__(self, words: Sequence[str]) -> int:
        """Run one command line; returns the exit code."""
        # What follows `--` is the script's, its --help too.
        own_words = words[: words.index("--")] if "--" in words else words
        if HELP_WORDS & set(own_words):
            options = self.options if "--help-all" in own_words else _everyday(self.options)
            show_help(f"dlojz {self.name}", options, self.text)
            if options != self.options:
                _show_more(self.name, self.options)
            return 0
        args = parse(f"dlojz {self.name}", self.options, words)
        self._check_places(args)
        with answering(args.get("json", False)) as answer:
            return self.run(args, answer) or 0

    def _check_places(self, args: Given) -> None:
        """Refuse an empty name of a file, and a picture that could not be written, before anything is computed."""
        for flag in self.options:
            value = args.get(flag.name)
            if (flag.metavar in _PLACES and value == "") or (flag.kind == "words" and value and "" in value):
                label = flag.metavar if flag.kind == "words" else flag.option
                raise LabError(phrase("empty word", label=label))
        check_writable(args, [flag.name for flag in self.options if flag.name in _PICTURES and args.get(flag.name)])


_PLACES, _PICTURES = ("FILE", "FOLDER"), ("figure", "png", "svg", "overlay")


@dataclass(frozen=True)
class VerbOfActions(Verb):
    """Command with actions, each a command of its own, as `dlojz labs build`; without one it does its own `run`."""

    actions: tuple[Verb, ...] = ()

    def __call__(self, words: Sequence[str]) -> int:
        """Run the action that is named.

        Raises:
            LabError: for an unknown action, and for an option that belongs to another one.
        """
        actions = {action.name.removeprefix(f"{self.name} "): action for action in self.actions}
        with_value = {flag.option for action in self.actions for flag in action.options if flag.kind == "value"}
        # The first word that is neither an option nor the value of one names the action.
        alone = [i for i, word in enumerate(words) if word[:1] != "-" and (not i or words[i - 1] not in with_value)]
        chosen: Verb = self
        if alone:
            name, words = words[alone[0]], [*words[: alone[0]], *words[alone[0] + 1 :]]
            if name not in actions:
                raise LabError(one_of(f"action of `dlojz {self.name}`", name, actions))
            chosen = actions[name]
        for option in (word.partition("=")[0] for word in words):
            owners = ", ".join(f"`dlojz {action.name}`" for action in self.actions if option in action.spelled)
            if owners and option not in chosen.spelled:
                raise LabError(phrase("option of another action", option=option, owners=owners))
        # Not `chosen(words)`: without an action this command is one like the others.
        return Verb.__call__(chosen, words)


def verb(name: str, **values: Values) -> Callable[[Callable[[Given, Answer], int | None]], Verb]:
    """Make a function the command `dlojz NAME`; the parameters are those of `Verb`."""
    return lambda run: Verb(name, run, values)


def _everyday(options: tuple[Flag, ...]) -> tuple[Flag, ...]:
    """Choose the options that `--help` shows: all of a few, of `LONG_HELP` or more the everyday ones."""
    return options if len(options) < LONG_HELP else tuple(flag for flag in options if flag.name in EVERYDAY)


def _show_more(name: str, options: Sequence[Flag]) -> None:
    """Print how to see every option, and how many there are: words that stand alone are none."""
    count = sum(bool(flag.spellings) for flag in options)
    command = f"`dlojz {name} --help-all`"
    sentence = phrase("everyday options", command=command, count=count)
    show(_wrapped(sentence, console(stderr=False).width))


def show_help(program: str, options: Sequence[Flag], text: HelpText) -> None:
    """Print the help of a command: usage, description, examples, and its options by subject."""
    terminal = console(stderr=False)
    words = next((f"{flag.metavar} " for flag in options if flag.kind == "words"), "")
    script_part = next((f" [-- {flag.metavar}]" for flag in options if flag.kind == "rest"), "")
    show(f"{say(en='usage:', fr='usage :')} {program} {words}[options]{script_part}\n")
    for paragraph in say(en=text.en, fr=text.fr).split("\n\n"):
        # A line break within a paragraph is a blank, but before command lines and indented lines.
        for line in re.sub(r"\n(?!dlojz | {4})", " ", paragraph).splitlines():
            show(_wrapped(line, terminal.width))
        show("")
    show(say(en="Examples:", fr="Exemples :"))
    for line in textwrap.dedent(text.examples).strip().splitlines():
        command, _, remark = line.partition(" # ")
        in_english, _, in_french = remark.partition(" // ")
        show(f"  {command}" + (f"   ({say(en=in_english, fr=in_french or in_english)})" if remark else ""))
    show("")
    subjects = dict.fromkeys(flag.subject for flag in options if flag.subject)
    width = min(WIDEST_NAME, max(len(_written(flag)) for flag in (*options, *shared_flags()["help"])))
    # None, the command's own options, comes last.
    for subject in (*subjects, None):
        columns = Table.grid(Column(width=width), Column(), padding=(0, 2, 0, 0))
        for flag in (*options, *shared_flags()["help"]):
            if flag.subject == subject:
                help_text = _wrapped(_help(flag), terminal.width - width - FRAME)
                columns.add_row(Text(_written(flag), style="bold"), Text(help_text))
        title = subject.title if subject else "options"
        terminal.print(Panel(columns, title=title, title_align="left", border_style="dim"))


def _choices(flag: Flag) -> list[str]:
    """List the choices in an option's metavar; none where it has no choices."""
    return flag.metavar.split("|") if "|" in flag.metavar and flag.kind != "words" else []


def _written(flag: Flag) -> str:
    """Write an option with its metavar, as the help shows it."""
    if flag.kind == "words":
        return flag.metavar
    if flag.kind == "rest":
        return f"-- {flag.metavar}"
    names = dict.fromkeys(spelling.replace("_", "-") for spelling in flag.spellings)
    written = " ".join((", ".join(names), flag.metavar)).rstrip()
    too_wide = len(written) > WIDEST_NAME and _choices(flag)
    return f"{', '.join(names)} {say(en='NAME', fr='NOM')}" if too_wide else written


def _help(flag: Flag) -> str:
    """Write the help of an option, with its choices where they do not fit beside its name, and its default."""
    sentences = [say(en=flag.en, fr=flag.fr)]
    choices = _choices(flag)
    if flag.metavar not in _written(flag) and not all(choice in sentences[0] for choice in choices):
        sentences.append(f"({say(en='one of', fr='parmi')} {', '.join(choices)})")
    if flag.default not in (None, "", ()) and flag.kind != "switch":
        plain = f"{flag.default:g}" if isinstance(flag.default, float) else flag.default
        sentences.append(say(en=f"(default: {plain})", fr=f"(par défaut : {plain})"))
    return " ".join(sentences)


def _wrapped(text: str, width: int) -> str:
    """Wrap a text; French punctuation stays on the line of its word, which rich does not know of."""
    unbroken = re.sub(r" (?=[:;?!»])|(?<=«) ", "\u00a0", text)
    return textwrap.fill(unbroken, width, break_long_words=False, break_on_hyphens=False)


@contextlib.contextmanager
def answering(as_json: bool) -> Iterator[Answer]:
    """Yield the one function that answers: a JSON document, or something rich prints.

    Args:
        as_json: whether everything else written to stdout meanwhile, also by child processes, goes to stderr.
    """
    if not as_json:
        yield show
        return
    sys.stdout.flush()
    # File descriptor 1 leads to stderr from here on, for child processes too; `answer_to` is the true stdout.
    answer_to = os.dup(1)
    os.dup2(2, 1)

    def write(content: Any = None, *, en: str = "", fr: str = "") -> None:
        text = json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
        # A copy of it: closing the file must leave `answer_to` open for the finally clause.
        with open(os.dup(answer_to), "w", encoding="utf-8") as stdout:
            stdout.write(text)

    try:
        yield write
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os.dup2(answer_to, 1)
        os.close(answer_to)


def show(content: RenderableType | None = None, *, en: str = "", fr: str = "") -> None:
    """Print something, or a sentence, on stdout, as wide as the terminal (100 columns where there is none)."""
    output = say(en=en, fr=fr) if content is None else content
    console(stderr=False).print(output, markup=False, highlight=False, soft_wrap=isinstance(output, str))


def tell(sentence: str = "", *, en: str = "", fr: str = "") -> None:
    """Print a sentence, or the one in the reader's language, on stderr, beside the answer."""
    print(sentence or say(en=en, fr=fr), file=sys.stderr, flush=True)


def tell_written(path: object, en: str = "figure", fr: str = "figure", note: str = "") -> None:
    """Print on stderr which file was written, if one was."""
    if path:
        tell(en=f"{en}: {path}{note}", fr=f"{fr} : {path}{note}")


WIDTH, NARROWEST, _DIGITS = 100, 40, 6
"""Columns where there is no terminal; the fewest for which anything is laid out; digits of a number of columns."""


def console(stderr: bool = True) -> Console:
    """Open a console on one of the two streams: as wide as $COLUMNS, else as the terminal, and never below 40."""
    stream = sys.stderr if stderr else sys.stdout
    setting = os.environ.get("COLUMNS", "")
    columns = int(setting) if setting.isdecimal() and len(setting) < _DIGITS else 0  # some environments set it to 0
    opened = Console(file=stream, width=columns or (None if stream.isatty() else WIDTH), highlight=False)
    return opened if opened.width >= NARROWEST else Console(file=stream, width=NARROWEST, highlight=False)


@contextlib.contextmanager
def progress_bar(label: str = "", total: float | None = None) -> Iterator[Callable[..., None]]:
    """Draw a progress bar on stderr; nothing where stderr is no terminal.

    Yields:
        what changes it: `update(done, total)`, with another `description` where one is given.
    """
    terminal = console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=terminal, disable=not terminal.is_terminal, transient=True) as progress:
            task = progress.add_task(label, total=total)

            def update(count: float, total: float | None = None, description: str | None = None) -> None:
                progress.update(task, completed=count, total=total, description=description)

            yield update
    finally:
        terminal.show_cursor(True)  # the bar hides it, and an interrupted process does not bring it back
