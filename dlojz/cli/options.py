"""Options of the commands: words to values, and answers as text or JSON.

The flags of a subcommand, made from the models of the package and parsed by tyro.

Tyro only splits the words and writes the help; whether a value is legal is said by the contracts, so that a notebook
and a terminal refuse with the same sentence.

What goes to stdout and what goes to stderr.

With `--json`, stdout carries exactly one JSON document whatever any library prints, because file descriptor 1 leads to
stderr while the work is done.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from types import UnionType
from typing import Annotated, Any, Literal

import tyro
from pydantic.fields import FieldInfo
from rich.console import Console, RenderableType

from dlojz.base.errors import LabError
from dlojz.base.language import one_of, say
from dlojz.config.layout import Layout
from dlojz.config.run_config import HIDDEN, RunConfig
from dlojz.hardware import DEVICES, Device, device


@dataclasses.dataclass(frozen=True)
class Flag:
    """One option: `--name VALUE`, a switch `--name`, or the words that stand alone."""

    name: str
    help: str
    metavar: str = "TEXT"
    kind: Literal["value", "switch", "words"] = "value"
    default: str = ""

    def annotated(self) -> tuple[str, Any, Any]:
        """The field that tyro makes this option from."""
        shown = tyro.conf.arg(
            help=self.help,
            metavar=self.metavar if self.kind != "switch" else None,
            help_behavior_hint=f"(default: {self.default})" if self.default else "",
        )
        if self.kind == "switch":
            return self.name, Annotated[bool, tyro.conf.FlagCreatePairsOff, shown], False
        if self.kind == "words":
            return self.name, Annotated[tuple[str, ...], tyro.conf.Positional, shown], ()
        return self.name, Annotated[str | None, shown], None

    @property
    def option(self) -> str:
        """How it is written on the command line."""
        return "--" + self.name.replace("_", "-")


def json_flag() -> Flag:
    """`--json`, the same everywhere."""
    return Flag(
        "json",
        say(
            en="answer with one JSON document on stdout; all else goes to stderr",
            fr="répondre par un document JSON sur stdout ; le reste va sur stderr",
        ),
        kind="switch",
    )


def root_flag() -> Flag:
    """`--root`, the same everywhere."""
    return Flag(
        "root",
        say(
            en="folder of the runs (default: $DLOJZ_RUNS, else runs/)",
            fr="dossier des exécutions (par défaut : $DLOJZ_RUNS, sinon runs/)",
        ),
        metavar="FOLDER",
    )


def config_flags() -> list[Flag]:
    """One flag per field of `RunConfig` and `Layout`, whose descriptions are the help."""
    fields = {**RunConfig.model_fields, **Layout.model_fields}
    return [_flag_of(name, field) for name, field in fields.items() if name not in HIDDEN]


def device_flag() -> Flag:
    """`--device` where figures are predicted: a GPU by its name, or what a run would choose."""
    return Flag(
        "device",
        say(
            en="GPU that the figures are for; without it, the CPU",
            fr="GPU pour lequel on prédit ; sans lui, le CPU",
        ),
        metavar="|".join(DEVICES),
        default="cpu",
    )


def predicting_flags() -> list[Flag]:
    """`config_flags`, with a `--device` that takes the name of a GPU."""
    return [device_flag() if flag.name == "device" else flag for flag in config_flags()]


def target_device(given: dict[str, Any], name: str = "device") -> Device | None:
    """The GPU that an option names, taken out of what was given; None for the CPU or where none is named.

    What a run calls its device (auto, cpu, cuda) stays where it is.

    Raises:
        LabError: for a name that is no device's; the sentence lists those there are.
    """
    if given.get(name) in (None, *typing.get_args(RunConfig.model_fields["device"].annotation)):
        return None
    return device(given.pop(name))


def config_of(given: dict[str, Any]) -> RunConfig:
    """The configuration that was asked for.

    Raises:
        LabError: if it is not legal.
    """
    fields = {flag.name for flag in config_flags()}
    return RunConfig.of(**typed({name: value for name, value in given.items() if name in fields}))


def typed(given: dict[str, Any]) -> dict[str, Any]:
    """Parse the numbers among the words of a command line, as the fields of `RunConfig` and `Layout` take them.

    Args:
        given: by name of the field; what is no number, where one is asked for, is left to its field to refuse.
    """
    fields = {**RunConfig.model_fields, **Layout.model_fields}
    return {name: _typed(value, _kinds(fields[name])) for name, value in given.items()}


def _typed(word: Any, kinds: tuple[Any, ...]) -> Any:
    kind = next((kind for kind in (int, float) if kind in kinds), None)
    if kind is None or not isinstance(word, str):
        return word
    try:
        return kind(word)
    except ValueError:
        return word


def _kinds(field: FieldInfo) -> tuple[Any, ...]:
    """The types that a field takes."""
    union = typing.get_origin(field.annotation) in (typing.Union, UnionType)
    return typing.get_args(field.annotation) if union else (field.annotation,)


def _flag_of(name: str, field: FieldInfo) -> Flag:
    kinds = _kinds(field)
    choices = [value for kind in kinds if typing.get_origin(kind) is Literal for value in typing.get_args(kind)]
    default = "" if field.default is None else str(field.default)
    if bool in kinds:
        return Flag(name, field.description or "", kind="switch")
    metavar = "|".join(choices) if choices else "INT" if int in kinds else "FLOAT" if float in kinds else "TEXT"
    return Flag(name, field.description or "", metavar=metavar, default=default)


def parse(command: str, description: str, flags: Sequence[Flag], words: Sequence[str]) -> dict[str, Any]:
    """Split the words of a command line; only what was given is in the answer.

    Raises:
        LabError: for an unknown flag, a flag without its value, or a word too many.
        SystemExit: 0, once `--help` has been printed.
    """
    shape = dataclasses.make_dataclass("Flags", [flag.annotated() for flag in flags])
    complaints = io.StringIO()
    given: Any
    unknown: list[str]
    try:
        with contextlib.redirect_stderr(complaints):
            given, unknown = tyro.cli(
                shape, prog=f"dlojz {command}", description=description, args=list(words), return_unknown_args=True
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise LabError(_no_value(flags, words)) from None
    if unknown:
        raise LabError(_refused(command, flags, unknown))
    return {flag.name: value for flag in flags if (value := getattr(given, flag.name)) not in (None, False, ())}


def number(given: dict[str, Any], name: str, kind: type[int] | type[float] = int, least: float = 0) -> Any:
    """A number among what was given, or None.

    Raises:
        LabError: if it is no number of this kind, or smaller than `least`.
    """
    text = given.get(name)
    if text is None:
        return None
    option = "--" + name.replace("_", "-")
    try:
        value = kind(text)
    except ValueError:
        raise LabError(
            say(
                en=f"{option} takes a number, but {text!r} was received.",
                fr=f"{option} attend un nombre, mais {text!r} a été reçu.",
            )
        ) from None
    if not least <= value < float("inf"):
        raise LabError(
            say(
                en=f"{option} must be at least {least:g} and finite, but {text!r} was received.",
                fr=f"{option} doit être fini et au moins égal à {least:g}, mais {text!r} a été reçu.",
            )
        )
    return value


def _refused(command: str, flags: Sequence[Flag], unknown: Sequence[str]) -> str:
    legal = [*(flag.option for flag in flags if flag.kind != "words"), "--help"]
    first = unknown[0]
    if first.startswith("-"):
        return one_of(
            say(en=f"flag of `dlojz {command}`", fr=f"option de `dlojz {command}`"), first.split("=")[0], legal
        )
    return say(
        en=f"`dlojz {command}` does not know what to do with the word {first!r}: an option is written --name VALUE. "
        f"Legal values: {', '.join(legal)}.",
        fr=f"`dlojz {command}` ne sait que faire du mot {first!r} : une option s’écrit --nom VALEUR. "
        f"Valeurs permises : {', '.join(legal)}.",
    )


def _no_value(flags: Sequence[Flag], words: Sequence[str]) -> str:
    options = {flag.option: flag for flag in flags if flag.kind == "value"}
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        flag = options.get(word.replace("_", "-"))
        if flag and after.startswith("--"):
            return say(
                en=f"{word} needs a value after it ({flag.metavar}), but none was received: write {word} "
                f"{flag.metavar}.",
                fr=f"{word} demande une valeur ({flag.metavar}), mais aucune n’a été reçue : écrivez {word} "
                f"{flag.metavar}.",
            )
    typed = " ".join(words)
    return say(
        en=f"the options {typed!r} could not be read: see --help for how they are written.",
        fr=f"les options {typed!r} n’ont pas pu être lues : --help dit comment elles s’écrivent.",
    )


def scheduler_flags() -> list[Flag]:
    """What a scheduler is told about a job besides the run itself."""
    return [
        Flag("account", say(en="whose hours are billed", fr="compte dont les heures sont facturées")),
        Flag("qos", say(en="quality of service; by default the first that fits", fr="QoS ; par défaut la première")),
        Flag("reservation", say(en="reservation, of a course say", fr="réservation, d’une formation par exemple")),
    ]


@contextlib.contextmanager
def answering(as_json: bool) -> Iterator[Callable[[Any], None]]:
    """Yield the one function that answers: a JSON document, or something rich prints.

    Args:
        as_json: whether everything else written to stdout meanwhile, also by child processes, goes to stderr.
    """
    if not as_json:
        yield show
        return
    sys.stdout.flush()
    answer_to = os.dup(1)
    os.dup2(2, 1)
    try:
        yield lambda data: _write(answer_to, data)
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os.dup2(answer_to, 1)
        os.close(answer_to)


def _write(descriptor: int, data: Any) -> None:
    text = json.dumps(data, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    with open(os.dup(descriptor), "w", encoding="utf-8") as stdout:
        stdout.write(text)


def show(renderable: RenderableType) -> None:
    """Print something on stdout, as wide as the terminal (100 columns where there is none)."""
    console(stderr=False).print(renderable, markup=False, highlight=False, soft_wrap=isinstance(renderable, str))


def tell(sentence: str) -> None:
    """Say something on stderr, beside the answer."""
    print(sentence, file=sys.stderr, flush=True)


def console(stderr: bool = True) -> Console:
    """A console on one of the two streams."""
    stream = sys.stderr if stderr else sys.stdout
    wide = None if stream.isatty() or "COLUMNS" in os.environ else 100
    return Console(file=stream, width=wide, highlight=False)
