"""The options of `dlojz compress`: what they teach, and what they come to.

Layer 6. Invariant: an option is refused in one sentence, before torch is loaded where that is possible.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dlojz.cli.compress_settings import settings_of
from dlojz.cli.flags import Flag, json_flag, number, root_flag
from dlojz.compress.methods import METHODS, method
from dlojz.schema import LabError
from dlojz.text import say

HELP = {
    "en": """Make a trained model smaller in several ways, and lay what each gives beside what it takes.

A teacher is trained on real handwritten digits (a few seconds; it is kept for the next time). Each method starts from
it: distillation (a smaller student learns the teacher's probabilities, logits or hidden states), quantization (weights
of 8, 4 or 2 bits, after training or during it) and pruning (weights that become zero: anywhere, or 2 of every 4).
Predictions come first, then everything is really done: the files are written and weighed, the answers timed in turns
with the teacher's.

How to read the board: accuracy is that on 360 images that nobody learnt from, so one image is 0.3%; "kept" is it over
the teacher's; size is predicted | measured (the file adds a header of names); time is that of an answer over the
teacher's, predicted | measured [half of the rounds], which a narrow terminal leaves out. A star marks the front: no
other line is at least as good in accuracy, size and time, and better in one. Zeros make a file small, but a dense
product multiplies by them all the same.

Examples:
  dlojz compress                                              (the default set, about a minute)
  dlojz compress --list                                       (all methods, with their options)
  dlojz compress --methods distill_soft --temperature 2 --seeds 5
  dlojz compress --methods magnitude_global,gradual --sparsity 0.95
  dlojz compress --methods int8_static,torch_int8_dynamic --figure board.png
  dlojz compress --methods int8_static --set int8_static.symmetric=false,int8_static.samples=64
  dlojz compress --model coatnet_tiny --methods student_alone,distill_logits --student vit_mini""",
    "fr": """Réduire un modèle entraîné de plusieurs façons, et mettre ce que chacune donne face à ce qu’elle prend.

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
multiplie quand même par eux.

Exemples :
  dlojz compress                                              (le choix par défaut, une minute environ)
  dlojz compress --list                                       (toutes les méthodes, avec leurs options)
  dlojz compress --methods distill_soft --temperature 2 --seeds 5
  dlojz compress --methods magnitude_global,gradual --sparsity 0.95
  dlojz compress --methods int8_static,torch_int8_dynamic --figure tableau.png
  dlojz compress --methods int8_static --set int8_static.symmetric=false,int8_static.samples=64
  dlojz compress --model coatnet_tiny --methods student_alone,distill_logits --student vit_mini""",
}
MOST_SEEDS, MOST_EPOCHS, MOST_ROUNDS = 50, 1000, 10_000
ALL = "all"
STUDENTS = "distillation"


def flags() -> list[Flag]:
    """The options, in the order of the help."""

    def value(name: str, english: str, french: str, metavar: str = "INT", default: str = "") -> Flag:
        return Flag(name, say(en=english, fr=french), metavar, default=default)

    return [
        value("methods", "names of --list, or all (default: some of each family)",
              "noms de --list, ou all (par défaut : quelques-unes de chaque famille)", "NAME[,NAME]"),
        value("model", "the teacher, of `dlojz models`", "le professeur, parmi `dlojz models`", "NAME", "vit_tiny"),
        value("student", "the student of the distillations", "l’étudiant des distillations", "NAME", "vit_mini"),
        value("temperature", "by which logits are divided", "par laquelle les logits sont divisés", "FLOAT", "4"),
        value("sparsity", "share of zeros, from 0 to below 1; by default each method's own",
              "part de zéros, de 0 à moins de 1 ; par défaut celle de chaque méthode", "FLOAT"),
        value("set", "another option of --list, of one method; repeatable, or with commas between",
              "autre option de --list, d’une méthode ; à répéter, ou séparées par des virgules",
              "METHOD.OPTION=VALUE"),
        value("seeds", "teachers; the board shows medians", "professeurs ; le tableau donne les médianes", default="1"),
        value("epochs", "of the teacher and of the students", "du professeur et des étudiants", default="12"),
        value("rounds", "answers that are timed", "réponses chronométrées", default="20"),
        value("threads", "of torch", "de torch", default="1"),
        value("figure", "picture to write (.png, .svg)", "image à écrire (.png, .svg)", "FILE"),
        value("layers", "picture of each quantized layer's error", "image de l’erreur de chaque couche quantifiée",
              "FILE"),
        value("output", "file of the board, to read again", "fichier du tableau, à relire", "FILE"),
        Flag("list", say(en="show the methods; train nothing", fr="montrer les méthodes, sans entraîner"),
             kind="switch"),
        root_flag(),
        json_flag(),
    ]  # fmt: skip


def methods_of(given: Mapping[str, Any]) -> tuple[tuple[str, ...], bool]:
    """The methods that are meant, and whether they were asked for by name.

    Raises:
        LabError: for one that does not exist or whose package is missing, or for none.
    """
    from dlojz.compress.board_record import DEFAULT_METHODS

    text = given.get("methods")
    if text is None or text.strip() == ALL:
        return (DEFAULT_METHODS if text is None else tuple(METHODS)), False
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise LabError(
            say(
                en=f"--methods takes names such as distill_soft,int8_static, but {text!r} was received: see --list.",
                fr=f"--methods attend des noms comme distill_soft,int8_static, mais {text!r} a été reçu : voir --list.",
            )
        )
    for name in names:
        lacking = method(name).missing()
        if lacking:
            raise LabError(lacking)
    return names, True


def options_of(given: dict[str, Any], methods: Sequence[str], chosen: bool) -> dict[str, dict[str, Any]]:
    """What each method is told over its own defaults.

    Raises:
        LabError: for a value that is not legal, or one that no method asked for by name takes.
    """
    maybe = {
        "student": given.get("student"),
        "temperature": _real(given, "temperature"),
        "sparsity": _real(given, "sparsity"),
    }
    asked: dict[str, Any] = {name: value for name, value in maybe.items() if value is not None}
    if "temperature" in asked:
        from dlojz.compress.distillation_losses import check_temperature

        check_temperature(asked["temperature"])
    if "sparsity" in asked:
        from dlojz.compress.masks import check_sparsity

        check_sparsity(asked["sparsity"])
    for name in asked:
        takers = [one for one in METHODS.values() if name in one.options]
        if chosen and not any(one.name in methods for one in takers):
            listed = ", ".join(one.name for one in takers)
            raise LabError(
                say(
                    en=f"--{name} was received, but none of {', '.join(methods)} has it: it is for {listed}.",
                    fr=f"--{name} a été reçu, mais aucune de {', '.join(methods)} n’en a : c’est pour {listed}.",
                )
            )
    found = {name: {key: value for key, value in asked.items() if key in METHODS[name].options} for name in methods}
    if "epochs" in given:
        for name in methods:
            if METHODS[name].family == STUDENTS:
                found[name]["epochs"] = positive(given, "epochs", 12)
    for name, own in settings_of(given.get("set"), methods).items():
        found[name].update(own)
    return found


def _real(given: Mapping[str, Any], name: str) -> float | None:
    """A number of any size, infinite or none at all: whoever takes it says its range."""
    try:
        return float(given[name]) if name in given else None
    except ValueError:
        raise LabError(
            say(
                en=f"--{name} takes a number, but {given[name]!r} was received.",
                fr=f"--{name} attend un nombre, mais {given[name]!r} a été reçu.",
            )
        ) from None


def seeds_of(given: Mapping[str, Any]) -> int:
    """How many teachers."""
    return positive(given, "seeds", 1, most=MOST_SEEDS)


def positive(given: Mapping[str, Any], name: str, default: int, most: int | None = None) -> int:
    """A whole number from 1 on.

    Raises:
        LabError: for anything else, or one that is beyond reason.
    """
    limit = most or {"epochs": MOST_EPOCHS, "rounds": MOST_ROUNDS}[name]
    value = number(dict(given), name, int, least=1)
    if value is not None and value > limit:
        raise LabError(
            say(
                en=f"--{name} must be at most {limit}, but {given[name]!r} was received.",
                fr=f"--{name} doit être au plus égal à {limit}, mais {given[name]!r} a été reçu.",
            )
        )
    return default if value is None else int(value)
