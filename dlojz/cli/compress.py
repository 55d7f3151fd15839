"""Command `dlojz compress`: make a trained model smaller in several ways, and compare accuracy, size and time.

What can be refused is refused before anything is trained, before torch is loaded where that is possible.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len

from dlojz.base.errors import LabError
from dlojz.base.language import byte_units, decimal, format_count, format_seconds, one_of, percent, refusal, say
from dlojz.base.table import Lines, Table, titles
from dlojz.cli.options import (
    FIGURE,
    JSON,
    ROOT,
    Answer,
    Given,
    check_writable,
    console,
    progress_bar,
    tell,
    tell_written,
    verb,
)
from dlojz.compress.board_record import TEACHER, Board, BoardLine, LayerSnr, family_title
from dlojz.compress.method import METHODS, LayerError, method

if TYPE_CHECKING:
    from dlojz.compress.board import BoardRequest, Watch
    from dlojz.compress.task import Task
    from dlojz.models import ModelSpec


def check_layers(methods: Sequence[str]) -> None:
    """Refuse `--layers` where no method quantizes.

    Raises:
        LabError: without a method of quantization.
    """
    if not any(METHODS[name].family == "quantization" for name in methods):
        names = ", ".join(name for name, entry in METHODS.items() if entry.family == "quantization")
        raise refusal(
            en=f"--layers draws the error of quantized layers, but {', '.join(methods)} quantizes none: add one of "
            f"{names}.",
            fr=f"--layers dessine l’erreur des couches quantifiées, mais {', '.join(methods)} n’en quantifie aucune : "
            f"ajoutez l’une de {names}.",
        )


def layers_of(board: Board) -> dict[str, list[LayerError]]:
    """Collect the layer errors of each method that quantizes, as medians over the seeds, in the order of the model."""
    layer_errors = {}
    for line in board.lines():
        trials = [trial.layer_errors for trial in board.of(line.method) if trial.layer_errors]
        if trials:
            # From rows by seed to columns by layer: `seeds` is one layer of all trials.
            layer_errors[line.method] = [_middle(seeds) for seeds in zip(*trials, strict=True)]
    return layer_errors


def draw_layers(board: Board, path: Path) -> None:
    """Draw the layer errors; methods beyond the number of markers are left out, with a sentence on stderr.

    Raises:
        LabError: if the picture cannot be written, or there is nothing to draw.
    """
    from dlojz.display.figures.compress_figures import MOST_SETTINGS, sqnr_figure

    errors = layers_of(board)
    drawn_errors = dict(list(errors.items())[:MOST_SETTINGS])
    if len(drawn_errors) < len(errors):
        names = ", ".join(name for name in errors if name not in drawn_errors)
        tell(
            en=f"--layers draws {MOST_SETTINGS} methods at most: without {names}.",
            fr=f"--layers dessine {MOST_SETTINGS} méthodes au plus : sans {names}.",
        )
    sqnr_figure(drawn_errors, path)


def _middle(seeds: Sequence[LayerSnr]) -> LayerError:
    # A layer without any noise has an infinite ratio, which its record holds as None.
    measured = [math.inf if layer.measured_sqnr_db is None else layer.measured_sqnr_db for layer in seeds]
    foreseen = [layer.predicted_sqnr_db for layer in seeds if layer.predicted_sqnr_db is not None]
    return LayerError(
        name=seeds[0].name,
        predicted_sqnr_db=statistics.median(foreseen) if foreseen else None,
        measured_sqnr_db=statistics.median(measured),
        bits=seeds[0].bits,
    )


TRUTHS = {"true": True, "false": False}


def settings_of(texts: Sequence[str], methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Parse `METHOD.OPTION=VALUE`, several of them with commas between, to the options of each method.

    Raises:
        LabError: for anything else, for a method that is not on the board, an option that it does not have, a value of
            another type, or an option that is set twice.
    """
    settings: dict[str, dict[str, Any]] = {}
    for part in filter(None, (word.strip() for word in ",".join(texts).split(","))):
        key, equals, value = (word.strip() for word in part.partition("="))
        name, dot, option = key.partition(".")
        if not (equals and dot and name and option and value):
            raise refusal(
                en=f"--set takes METHOD.OPTION=VALUE such as int8_static.samples=64, but {part!r} was received: see "
                "--list.",
                fr=f"--set attend MÉTHODE.OPTION=VALEUR comme int8_static.samples=64, mais {part!r} a été reçu : voir "
                "--list.",
            )
        chosen = method(name)
        if name not in methods:
            raise refusal(
                en=f"--set {part} was received, but {name} is not on the board: add it to --methods.",
                fr=f"--set {part} a été reçu, mais {name} n’est pas au tableau : ajoutez-la à --methods.",
            )
        chosen.check_options([option])
        if option in settings.setdefault(name, {}):
            raise refusal(
                en=f"--set gives {key} twice: keep one of them.",
                fr=f"--set donne {key} deux fois : gardez-en une.",
            )
        settings[name][option] = _typed(key, value, METHODS[name].options[option])
    return settings


def _typed(key: str, text: str, default: Any) -> Any:
    """Parse a value to the type of its default."""
    # bool comes before int: isinstance(True, int) holds.
    if isinstance(default, bool):
        if text.lower() not in TRUTHS:
            raise LabError(one_of(key, text, TRUTHS))
        return TRUTHS[text.lower()]
    if not isinstance(default, int | float):
        return text
    kind = type(default)
    try:
        value = kind(text)
        if math.isfinite(value):
            return value
    except ValueError:
        pass
    raise refusal(
        en=f"{key} takes a {'whole' if kind is int else 'finite'} number such as {default}, but {text!r} was received.",
        fr=f"{key} attend un nombre {'entier' if kind is int else 'fini'} comme {default}, mais {text!r} a été reçu.",
    )


STUDENTS = "distillation"
MOST_PARAMETERS = 30e6
"""A larger teacher cannot be trained on a few cores while one waits."""


@verb(
    "compress",
    f"""
    --methods NAME[,NAME]  names of --list, or all (default: some of each family)
        // noms de --list, ou all (par défaut : quelques-unes de chaque famille)
    --model NAME = vit_tiny  the teacher, of `dlojz models` // le professeur, parmi `dlojz models`
    --student NAME  the student of the distillations (default: vit_mini)
        // l’étudiant des distillations (par défaut : vit_mini)
    --temperature NUMBER  by which logits are divided (default: 4)
        // par laquelle les logits sont divisés (par défaut : 4)
    --sparsity NUMBER  share of zeros, from 0 to below 1; by default each method's own
        // part de zéros, de 0 à moins de 1 ; par défaut celle de chaque méthode
    --set METHOD.OPTION=VALUE...  another option of --list, of one method; repeatable, or with commas between
        // autre option de --list, d’une méthode ; à répéter, ou séparées par des virgules
    --seeds INT>=1<=50 = 1  teachers; the board shows medians // professeurs ; le tableau donne les médianes
    --epochs INT>=1<=1000 = 12  of the teacher and of the students // du professeur et des étudiants
    --rounds INT>=1<=10000 = 20  answers that are timed // réponses chronométrées
    --threads INT>=1<={os.cpu_count() or 1} = 1  of torch // de torch
    --layers FILE  picture of each quantized layer's error // image de l’erreur de chaque couche quantifiée
    --output FILE  file of the board, to read again // fichier du tableau, à relire
    --list  show the methods; train nothing // montrer les méthodes, sans entraîner
    """,
    FIGURE,
    ROOT,
    JSON,
    en="""Make a trained model smaller in several ways, and compare what each way saves and costs.

A teacher is trained on real handwritten digits (a few seconds; it is kept for the next time). Each method starts from
it: distillation (a smaller student learns the teacher's probabilities, logits or hidden states), quantization (weights
of 8, 4 or 2 bits, after training or during it) and pruning (weights that become zero: anywhere, or 2 of every 4).
Predictions come first, then everything is really done: the files are written and weighed, the answers timed in turns
with the teacher's.

How to read the board: accuracy is that on 360 images that nobody learnt from, so one image is 0.3%; "kept" is it over
the teacher's; size is predicted | measured (the file adds a header of names); time is that of an answer over the
teacher's, predicted | measured [half of the rounds], which a narrow terminal leaves out. A star marks the front: no
other line is at least as good in accuracy, size and time, and better in one. Zeros make a file small, but a dense
product multiplies by them all the same.""",
    fr="""Réduire un modèle entraîné de plusieurs façons, et mettre ce que chacune donne face à ce qu’elle prend.

Un professeur est entraîné sur de vrais chiffres manuscrits (quelques secondes ; il est gardé pour la fois suivante).
Chaque méthode part de lui : distillation (un étudiant plus petit apprend les probabilités, les logits ou les états
cachés du professeur), quantification (poids de 8, 4 ou 2 bits, après l’entraînement ou pendant) et élagage (des poids
deviennent nuls : n’importe où, ou 2 sur 4). On prédit d’abord, puis tout est vraiment fait : les fichiers sont écrits
et pesés, les réponses chronométrées tour à tour avec celles du professeur.

Comment lire le tableau : l’exactitude est mesurée sur 360 images dont personne n’a rien appris, donc une image vaut
0,3 % ; « gardé » la rapporte à celle du professeur ; la taille est prédite | mesurée (le fichier ajoute un en-tête de
noms) ; le temps est celui d’une réponse rapporté à celui du professeur, prédit | mesuré [la moitié des tours], cette
moitié étant omise dans un terminal étroit. Une étoile marque le front : aucune autre ligne n’est au moins aussi bonne
en exactitude, taille et temps, et meilleure sur l’un d’eux. Des zéros rendent un fichier petit, mais un produit dense
multiplie quand même par eux.""",
    examples="""
    dlojz compress # the default set, about a minute // le choix par défaut, une minute environ
    dlojz compress --list # all methods, with their options // toutes les méthodes, avec leurs options
    dlojz compress --methods distill_soft --temperature 2 --seeds 5
    dlojz compress --methods magnitude_global,gradual --sparsity 0.95
    dlojz compress --methods int8_static,torch_int8_dynamic --figure board.png
    dlojz compress --methods int8_static --set int8_static.symmetric=false --set int8_static.samples=64
    dlojz compress --model coatnet_tiny --methods student_alone,distill_logits --student vit_mini
    """,
)
def compress_command(args: Given, answer: Answer) -> None:
    """Make the board, show it, and conclude."""
    if args["list"]:
        answer(catalogue_document() if args["json"] else catalogue())
        return
    board = _board(args)
    answer(document(board) if args["json"] else table(board, console(stderr=False).width))
    if not args["json"]:
        answer(conclusion(board))
    for sentence in remarks(board):
        tell(sentence)
    _keep(board, args)  # last: what cannot be written after all takes no answer away
    for name in ("figure", "layers", "output"):
        tell_written(args[name], "written", "écrit")


def methods_of(args: Given) -> tuple[tuple[str, ...], bool]:
    """Parse `--methods`: the names, and whether they were asked for one by one.

    Raises:
        LabError: for one that does not exist or whose package is missing, or for none.
    """
    from dlojz.compress.board_record import DEFAULT_METHODS

    text = args.get("methods")
    if text is None or text.strip() == "all":
        return (DEFAULT_METHODS if text is None else tuple(METHODS)), False
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise refusal(
            en=f"--methods takes names such as distill_soft,int8_static, but {text!r} was received: see --list.",
            fr=f"--methods attend des noms comme distill_soft,int8_static, mais {text!r} a été reçu : voir --list.",
        )
    for name in names:
        lacking = method(name).missing()
        if lacking:
            raise LabError(lacking)
    return names, True


def options_of(args: Given, methods: Sequence[str], chosen: bool) -> dict[str, dict[str, Any]]:
    """Collect the options of each method that differ from its own defaults.

    Raises:
        LabError: for a value that is not legal, or one that no method asked for by name takes.
    """
    # Only what the command line gives: a method keeps its own default for the rest.
    choices: dict[str, Any] = {"student": args["student"]} if "student" in args else {}
    choices |= {name: args[name] for name in ("temperature", "sparsity") if name in args}
    if "temperature" in choices:
        from dlojz.compress.distillation import check_temperature

        check_temperature(choices["temperature"])
    if "sparsity" in choices:
        from dlojz.compress.masks import check_sparsity

        check_sparsity(choices["sparsity"])
    # `--methods all` passes an option to those that have it; of methods named one by one, one must have it.
    for name in choices:
        takers = [entry for entry in METHODS.values() if name in entry.options]
        if chosen and not any(taker.name in methods for taker in takers):
            taker_names = ", ".join(taker.name for taker in takers)
            raise refusal(
                en=f"--{name} was received, but none of {', '.join(methods)} has it: it is for {taker_names}.",
                fr=f"--{name} a été reçu, mais aucune de {', '.join(methods)} n’en a : c’est pour {taker_names}.",
            )
    options = {name: {key: value for key, value in choices.items() if key in METHODS[name].options} for name in methods}
    if "epochs" in args:
        for name in methods:
            if METHODS[name].family == STUDENTS:
                options[name]["epochs"] = args["epochs"]
    # --set comes last, so that it overrides the general options of the same name.
    for name, settings in settings_of(args["set"], methods).items():
        options[name].update(settings)
    return options


def _board(args: Given) -> Board:
    methods, chosen = methods_of(args)  # before torch is there: a typing error is answered at once
    options = options_of(args, methods, chosen)
    model = args["model"]
    size = image_size(model, *_students(methods, options))
    check_writable(args, ("figure", "layers"), ("output",))
    if args["layers"]:
        check_layers(methods)

    import torch

    from dlojz.compress.board import BoardRequest, make_board
    from dlojz.compress.distillation import LargerStudentWarning
    from dlojz.compress.task import Settings, digits
    from dlojz.running.store import runs_root

    threads_before = torch.get_num_threads()
    torch.set_num_threads(args["threads"])
    task = digits(size)
    request = BoardRequest(
        teacher=model,
        methods=methods,
        options=options,
        seeds=range(args["seeds"]),
        settings=Settings(epochs=args["epochs"]),
        rounds=args["rounds"],
        folder=runs_root(args["root"]) / "teachers",
        strict=chosen,
    )
    _warn_of_students(request, task)
    try:
        with _bars() as watch, warnings.catch_warnings():
            warnings.simplefilter("ignore", LargerStudentWarning)  # it has been told, once
            return make_board(request, task, watch)
    finally:
        torch.set_num_threads(threads_before)


def image_size(*names: str) -> int:
    """Choose the image size: the smallest that teacher and students all read, at least that of the digits.

    Raises:
        LabError: for a model that is unknown, that reads text, or that is too large to be trained here.
    """
    from dlojz import models

    for name in names:
        if ":" in name:
            stem = name.rpartition("/")[2]
            raise refusal(
                en=f"dlojz compress trains models of the catalogue, but {stem} comes from elsewhere: use one of "
                f"{', '.join(_trainable())}.",
                fr=f"dlojz compress entraîne des modèles du catalogue, mais {stem} vient d’ailleurs : prenez l’un de "
                f"{', '.join(_trainable())}.",
            )
        if name not in models.names():
            raise LabError(one_of(say(en="model", fr="modèle"), name, _trainable()))
        entry = models.spec(name)
        if entry.family != "image":
            raise refusal(
                en=f"dlojz compress trains on images of digits, but {name} reads text: use a model of images such as "
                "vit_tiny, coatnet_tiny or alexnet_tiny.",
                fr=f"dlojz compress entraîne sur des images de chiffres, mais {name} lit du texte : prenez un modèle "
                "d’images comme vit_tiny, coatnet_tiny ou alexnet_tiny.",
            )
    size = _common_size([models.spec(name) for name in names])
    for name in names:
        count = models.describe(name, size, num_classes=10).parameters
        if count > MOST_PARAMETERS:
            raise refusal(
                en=f"{name} has {count / 1e6:.0f} M parameters, too many to train while you wait: use a model of at "
                f"most {MOST_PARAMETERS / 1e6:.0f} M, such as vit_tiny, coatnet_tiny or alexnet_tiny.",
                fr=f"{name} a {count / 1e6:.0f} M de paramètres, trop pour l’entraîner pendant que vous attendez : "
                f"prenez un modèle de {MOST_PARAMETERS / 1e6:.0f} M au plus, comme vit_tiny, coatnet_tiny ou "
                "alexnet_tiny.",
            )
    return size


def _common_size(entries: Sequence[ModelSpec]) -> int:
    from dlojz.compress.board_record import IMAGE_SIZE

    multiple = math.lcm(*(entry.image_multiple for entry in entries))
    smallest = max(IMAGE_SIZE, *(entry.smallest_image for entry in entries))
    # Rounded up to a multiple that every model takes: the least common one of their image multiples.
    return -(-smallest // multiple) * multiple


def _trainable() -> list[str]:
    """List the models of images that are small enough."""
    from dlojz import models

    return [
        entry.name
        for entry in map(models.spec, models.names())
        if entry.family == "image"
        and models.describe(entry.name, _common_size([entry]), num_classes=10).parameters <= MOST_PARAMETERS
    ]


def _warn_of_students(request: BoardRequest, task: Task) -> None:
    from dlojz.compress.distillation import larger_than_teacher

    for student in _students(request.methods, request.options):
        sentence = larger_than_teacher(student, request.teacher, task)
        if sentence:
            tell(en=f"warning: {sentence}", fr=f"attention : {sentence}")


def _students(methods: Sequence[str], options: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """List the students that the methods will build, each once."""
    method_options = [{**METHODS[name].options, **options.get(name, {})} for name in methods]
    return list(dict.fromkeys(str(settings["student"]) for settings in method_options if "student" in settings))


@contextlib.contextmanager
def _bars() -> Iterator[Watch]:
    """Draw one progress bar for the current task; nothing where stderr is no terminal."""
    with progress_bar() as update:
        yield lambda label, count, total: update(count, total, label)


def _keep(board: Board, args: Given) -> None:
    if args["output"]:
        from dlojz.compress.board_record import write_board

        write_board(Path(args["output"]).expanduser(), board)
    if args["figure"]:
        from dlojz.display.figures.compress_figures import compress_figure

        compress_figure(board, Path(args["figure"]).expanduser())
    if args["layers"]:
        draw_layers(board, Path(args["layers"]).expanduser())


KEPT = 0.97
"""Of the teacher's accuracy: what DistilBERT kept of BERT's. Source: Sanh et al. 2019 (arXiv 1910.01108), abstract."""
STAR = "★"
KIBIBYTE = 1024
WEIGHTS, SPREAD, FORESEEN = "weights", "spread", "foreseen"
"""Columns, or parts of one, that a narrow table leaves out, in this order."""


def table(board: Board, width: int = 100) -> Table:
    """Lay out the board: one line per method, the teacher first, a star before those on the Pareto front.

    Args:
        width: characters of a line; where they are too few, the weights are left out, then what was foreseen of time
            and the rounds' spread, so that nothing of what stays is cut.
    """
    lines, front = board.lines(), {line.method for line in board.front()}
    for dropped in ((), (WEIGHTS,), (WEIGHTS, SPREAD), (WEIGHTS, SPREAD, FORESEEN)):
        rows = [_titles(dropped), *(_cells(line, line.method in front, dropped) for line in lines)]
        # Each column as wide as its widest cell, one blank between two.
        if sum(max(map(cell_len, column)) + 1 for column in zip(*rows, strict=True)) <= width:
            break
    return Table(rows[0], tuple(rows[1:]), board.title(), align="lr", whole=1)


def _titles(dropped: Sequence[str]) -> tuple[str, ...]:
    time = say(en="time", fr="temps")
    if FORESEEN not in dropped:
        time = say(en="pred.|time", fr="préd.|temps")
    if SPREAD not in dropped:
        time += say(en=" [half]", fr=" [moitié]")
    return (
        say(en="  method", fr="  méthode"),
        say(en="accuracy", fr="exact."),
        say(en="kept", fr="gardé"),
        *(() if WEIGHTS in dropped else (say(en="weights", fr="poids"),)),
        say(en=f"{byte_units()[1]}: pred.|file", fr=f"{byte_units()[1]} : préd.|fich."),
        "÷",
        time,
    )


def _cells(line: BoardLine, on_front: bool, dropped: Sequence[str]) -> tuple[str, ...]:
    foreseen = "—" if line.predicted_latency_ratio is None else decimal(line.predicted_latency_ratio, 2)
    time = decimal(line.latency_ratio, 2) if FORESEEN in dropped else f"{foreseen}|{decimal(line.latency_ratio, 2)}"
    if SPREAD not in dropped:
        time += f" [{decimal(line.latency_ratio_low, 2)}–{decimal(line.latency_ratio_high, 2)}]"
    return (
        f"{STAR if on_front else ' '} {family_title(TEACHER) if line.method == TEACHER else line.method}",
        percent(line.accuracy),
        percent(line.kept),
        *(() if WEIGHTS in dropped else (format_count(line.parameters),)),
        f"{line.predicted_bytes / KIBIBYTE:.0f}|{line.file_bytes / KIBIBYTE:.0f}",
        decimal(line.ratio, 1),
        format_seconds(line.latency_s) if line.method == TEACHER else time,
    )


def conclusion(board: Board) -> str:
    """Conclude from the board, in a few sentences."""
    lines = [line for line in board.lines() if line.method != TEACHER]
    good = [line for line in lines if line.kept >= KEPT]
    if not lines:
        return say(en="No method was tried.", fr="Aucune méthode n’a été essayée.")
    if not good:
        best = max(lines, key=lambda line: line.accuracy)
        return say(
            en=f"None keeps {percent(KEPT, 0)} of the teacher's accuracy; the best is {best.method}, which keeps "
            f"{percent(best.kept)}.",
            fr=f"Aucune ne garde {percent(KEPT, 0)} de l’exactitude du professeur ; la meilleure est {best.method}, "
            f"qui en garde {percent(best.kept)}.",
        )
    small = min(good, key=lambda line: line.file_bytes)
    # In three quarters of the rounds it was faster than the teacher: more than noise around 1.
    faster = [line for line in good if line.latency_ratio_high < 1]
    smallest = say(
        en=f"Smallest that keeps {percent(KEPT, 0)} of the teacher's accuracy: {small.method}, a file "
        f"{decimal(small.ratio, 1)} times smaller, answers in {decimal(small.latency_ratio, 2)} times the "
        "teacher's time.",
        fr=f"La plus petite qui garde {percent(KEPT, 0)} de l’exactitude du professeur : {small.method}, un "
        f"fichier {decimal(small.ratio, 1)} fois plus petit, des réponses en {decimal(small.latency_ratio, 2)} "
        "fois le temps du professeur.",
    )
    if not faster:
        fastest = say(
            en="None of these is clearly faster than its teacher: in a quarter of the rounds or more, it is not.",
            fr="Aucune d’elles n’est nettement plus rapide que son professeur : dans un quart des tours au moins, "
            "elle ne l’est pas.",
        )
    else:
        fast = min(faster, key=lambda line: line.latency_ratio)
        fastest = say(
            en=f"Fastest of these: {fast.method}, in {decimal(fast.latency_ratio, 2)} times the teacher's time.",
            fr=f"La plus rapide d’entre elles : {fast.method}, en {decimal(fast.latency_ratio, 2)} fois le temps "
            "du professeur.",
        )
    return f"{smallest}\n{fastest}"


def remarks(board: Board) -> list[str]:
    """List what was left out, and the notes on single methods."""
    sentences = [
        say(en=f"{name} was left out: {reason}", fr=f"{name} a été laissée de côté : {reason}")
        for name, reason in board.left_out.items()
    ]
    colon = say(en=":", fr=" :")
    methods_by_note: dict[str, list[str]] = {}
    for line in board.lines():
        for note in line.notes:
            methods_by_note.setdefault(note, []).append(line.method)
    return [*sentences, *(f"{', '.join(names)}{colon} {note}" for note, names in methods_by_note.items())]


def document(board: Board) -> dict[str, Any]:
    """Write the board as one JSON document: trials, medians, front."""
    return {
        **board.to_dict(),
        "lines": [line.to_dict() for line in board.lines()],
        "front": [line.method for line in board.front()],
    }


def catalogue() -> Table:
    """List all methods with their options."""
    rows, before = [], ""
    for entry in METHODS.values():
        options = ", ".join(f"{name}={value}" for name, value in entry.options.items())
        summary = Lines("\n  ".join(filter(None, (entry.summary(), options))))
        rows.append((family_title(entry.family) if entry.family != before else "", entry.name, summary))
        before = entry.family
    return Table(titles(en="family; method; ", fr="famille; méthode; "), tuple(rows), align="l", whole=2)


def catalogue_document() -> list[dict[str, Any]]:
    """List all methods as JSON data."""
    return [
        {"name": entry.name, "family": entry.family, "summary": entry.summary(), "options": dict(entry.options)}
        for entry in METHODS.values()
    ]
