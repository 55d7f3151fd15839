"""`dlojz compress`: one trained model made smaller in several ways, and what each way gives and takes.

Layer 6. Invariant: what can be refused is refused before anything is trained; with `--json`, stdout carries the board
alone.
"""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dlojz import cli
from dlojz.cli.answer import answering, console, tell
from dlojz.cli.compress_flags import HELP, flags, methods_of, options_of, positive, seeds_of
from dlojz.cli.compress_settings import joined
from dlojz.cli.flags import parse
from dlojz.compress.methods import METHODS
from dlojz.schema import LabError, one_of
from dlojz.text import say

if TYPE_CHECKING:
    from dlojz.compress.board import Request, Watch
    from dlojz.compress.board_record import Board
    from dlojz.compress.task import Task
    from dlojz.models import ModelSpec

DEFAULT_MODEL = "vit_tiny"
MOST_PARAMETERS = 30e6
"""Beyond, a teacher is nothing to train on a few cores while one waits."""


def compress_command(words: list[str]) -> int:
    """Make the board, show it, and say what to conclude."""
    given = parse("compress", say(**HELP), flags(), joined(words))
    with answering(given.get("json", False)) as answer:
        if given.get("list"):
            from dlojz.cli.compress_words import catalogue, catalogue_document

            answer(catalogue_document() if given.get("json") else catalogue())
            return cli.DONE
        board = _board(given)
        from dlojz.cli.compress_words import conclusion, document, remarks, table

        answer(document(board) if given.get("json") else table(board, console(stderr=False).width))
        if not given.get("json"):
            answer(conclusion(board))
        for sentence in remarks(board):
            tell(sentence)
        _keep(board, given)  # last: what cannot be written after all takes no answer away
    for name in ("figure", "layers", "output"):
        if given.get(name):
            tell(say(en=f"written: {given[name]}", fr=f"écrit : {given[name]}"))
    return cli.DONE


def _board(given: dict[str, Any]) -> Board:
    methods, chosen = methods_of(given)  # before torch is there: a typing error is answered at once
    options = options_of(given, methods, chosen)
    seeds, epochs = seeds_of(given), positive(given, "epochs", 12)
    rounds, threads = positive(given, "rounds", 20), positive(given, "threads", 1, most=os.cpu_count() or 1)
    model = given.get("model", DEFAULT_MODEL)
    size = image_size(model, *_students(methods, options))
    _check_paths(given)
    if given.get("layers"):
        from dlojz.cli.compress_layers import check_layers

        check_layers(methods)

    import torch

    from dlojz.compress.board import Request, make_board
    from dlojz.compress.distillation import LargerStudentWarning
    from dlojz.compress.fitting import Settings
    from dlojz.compress.task import digits
    from dlojz.runs.store import runs_root

    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    task = digits(size)
    request = Request(
        teacher=model,
        methods=methods,
        options=options,
        seeds=range(seeds),
        settings=Settings(epochs=epochs),
        rounds=rounds,
        folder=runs_root(given.get("root")) / "teachers",
        strict=chosen,
    )
    _warn_of_students(request, task)
    try:
        with _bars() as watch, warnings.catch_warnings():
            warnings.simplefilter("ignore", LargerStudentWarning)  # it has been told, once
            return make_board(request, task, watch)
    finally:
        console().show_cursor(True)  # the bar hides it, and an interrupted process does not bring it back
        torch.set_num_threads(threads_before)


def image_size(*names: str) -> int:
    """Pixels of a side that teacher and students all read: the least, and no less than the digits have.

    Raises:
        LabError: for a model that is unknown, that reads text, or that is too large to be trained here.
    """
    from dlojz import models

    for name in names:
        if name not in models.names():
            raise LabError(one_of(say(en="model", fr="modèle"), name, _trainable()))
        entry = models.spec(name)
        if entry.family != "image":
            raise LabError(
                say(
                    en=f"dlojz compress trains on images of digits, but {name} reads text: use a model of images such "
                    "as vit_tiny, coatnet_tiny or alexnet_tiny.",
                    fr=f"dlojz compress entraîne sur des images de chiffres, mais {name} lit du texte : prenez un "
                    "modèle d’images comme vit_tiny, coatnet_tiny ou alexnet_tiny.",
                )
            )
    size = _common_size([models.spec(name) for name in names])
    for name in names:
        found = models.describe(name, size, num_classes=10).parameters
        if found > MOST_PARAMETERS:
            raise LabError(
                say(
                    en=f"{name} has {found / 1e6:.0f} M parameters, too many to train while you wait: use a model of "
                    f"at most {MOST_PARAMETERS / 1e6:.0f} M, such as vit_tiny, coatnet_tiny or alexnet_tiny.",
                    fr=f"{name} a {found / 1e6:.0f} M de paramètres, trop pour l’entraîner pendant que vous attendez : "
                    f"prenez un modèle de {MOST_PARAMETERS / 1e6:.0f} M au plus, comme vit_tiny, coatnet_tiny ou "
                    "alexnet_tiny.",
                )
            )
    return size


def _common_size(entries: Sequence[ModelSpec]) -> int:
    from dlojz.compress.board_record import IMAGE_SIZE

    multiple = math.lcm(*(entry.image_multiple for entry in entries))
    least = max(IMAGE_SIZE, *(entry.smallest_image for entry in entries))
    return -(-least // multiple) * multiple


def _trainable() -> list[str]:
    """The models of images that are small enough."""
    from dlojz import models

    return [
        entry.name
        for entry in map(models.spec, models.names())
        if entry.family == "image"
        and models.describe(entry.name, _common_size([entry]), num_classes=10).parameters <= MOST_PARAMETERS
    ]


def _check_paths(given: Mapping[str, Any]) -> None:
    """Refuse a picture or a file that could not be written, before minutes are spent on it.

    Raises:
        LabError: for an ending that is no picture's, a folder, or a place that may not be written to.
        OSError: for a folder that cannot be made.
    """
    for name in ("figure", "layers"):
        picture = given.get(name)
        if picture and Path(picture).suffix.lower() not in (".png", ".svg", ".pdf"):
            raise LabError(
                say(
                    en=f"--{name} needs a name that ends in .png, .svg or .pdf, but {picture!r} was received.",
                    fr=f"--{name} attend un nom qui finit par .png, .svg ou .pdf, mais {picture!r} a été reçu.",
                )
            )
    for name in ("figure", "layers", "output"):
        if given.get(name):
            path = Path(given[name]).expanduser().absolute()
            if path.is_dir():
                raise LabError(
                    say(
                        en=f"--{name} takes the name of a file, but {given[name]!r} is a folder: add a name to it.",
                        fr=f"--{name} attend un nom de fichier, mais {given[name]!r} est un dossier : ajoutez-y un "
                        "nom.",
                    )
                )
            path.parent.mkdir(parents=True, exist_ok=True)  # what the system refuses is told by `dlojz` itself
            # A picture is written in place; a board replaces the file, for which the folder counts.
            in_place = name != "output" and path.exists()
            if not os.access(path if in_place else path.parent, os.W_OK):
                raise LabError(
                    say(
                        en=f"--{name} cannot be written to {given[name]!r}, which is read-only: give another path.",
                        fr=f"--{name} ne peut pas être écrit dans {given[name]!r}, en lecture seule : donnez un autre "
                        "chemin.",
                    )
                )


def _warn_of_students(request: Request, task: Task) -> None:
    from dlojz.compress.distilling import larger_than_teacher

    for student in _students(request.methods, request.options):
        sentence = larger_than_teacher(student, request.teacher, task)
        if sentence:
            tell(say(en=f"warning: {sentence}", fr=f"attention : {sentence}"))


def _students(methods: Sequence[str], options: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Those that the methods will build, each once."""
    asked = [{**METHODS[name].options, **options.get(name, {})} for name in methods]
    return list(dict.fromkeys(str(one["student"]) for one in asked if "student" in one))


@contextlib.contextmanager
def _bars() -> Iterator[Watch]:
    """One bar for whatever is under way; nothing where stderr is no terminal."""
    shown = console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=shown, disable=not shown.is_terminal, transient=True) as progress:
        bars: dict[str, Any] = {}

        def watch(label: str, done: int, total: int) -> None:
            if label not in bars:
                for bar in bars.values():
                    progress.remove_task(bar)
                bars.clear()
                bars[label] = progress.add_task(label, total=total)
            progress.update(bars[label], completed=done, total=total)

        yield watch


def _keep(board: Board, given: Mapping[str, Any]) -> None:
    if given.get("output"):
        from dlojz.compress.board_record import write_board

        write_board(Path(given["output"]).expanduser(), board)
    if given.get("figure"):
        from dlojz.viz.compress_figure import compress_figure

        compress_figure(board, Path(given["figure"]).expanduser())
    if given.get("layers"):
        from dlojz.cli.compress_layers import draw_layers

        draw_layers(board, Path(given["layers"]).expanduser())
