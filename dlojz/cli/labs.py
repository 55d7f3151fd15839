"""Commands of the labs: `dlojz labs` (list, progress, copy, glossary, book, repair, build), `dlojz diff`.

What is only shown changes nothing; `build --check` writes nothing and fails where a generated file differs; a repair
loses no answer. Only `build` executes solutions.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from dlojz.base.errors import LabError
from dlojz.base.files import write_atomic
from dlojz.base.language import format_bytes, language, one_of, refusal, say
from dlojz.base.table import Table, titles
from dlojz.cli.options import JSON, ROOT, WORDS, Answer, Given, fields_of, tell, tell_written, verb

COLUMNS = 120


def show_list(args: Given, answer: Answer) -> None:
    """List the labs in their order."""
    from dlojz.labs.kit.contents import LABS, duration, total_minutes

    if args["json"]:
        answer(
            [
                {
                    "lab": entry.number,
                    "title_en": entry.title.en,
                    "title_fr": entry.title.fr,
                    "teaches_en": entry.teaches.en,
                    "teaches_fr": entry.teaches.fr,
                    **fields_of(entry, "notebook", "minutes", "processes"),
                    "after": list(entry.after),
                    "campaigns": list(entry.campaigns),
                }
                for entry in LABS
            ]
        )
        return
    rows = [
        (entry.heading(language()), duration(entry.minutes), ", ".join(entry.after) or "—", str(entry.processes))
        for entry in LABS
    ]
    rows.append((say(en="all", fr="tous"), duration(total_minutes()), "", ""))
    head = titles(en="lab; time; after; processes", fr="TP; durée; après; processus")
    answer(Table(head, tuple(rows), align="lllr"))


def show_progress(args: Given, answer: Answer) -> None:
    """Show a student's progress in all labs."""
    from dlojz.labs.kit.progress_page import read_overview
    from dlojz.running.store import runs_root

    overview = read_overview(runs_root(args["root"]))
    if "html" in args:
        path = Path(args["html"]).expanduser()
        write_atomic(path, overview.page())
        tell_written(path, "page", "page")
    answer(overview.data() if args["json"] else str(overview))


def show_glossary(args: Given, answer: Answer) -> None:
    """Look up one word of the glossary, or list all."""
    from dlojz.labs.kit.contents import in_order, look_up

    entries = look_up(" ".join(args[WORDS])) if args[WORDS] else in_order(language())
    if args["json"]:
        answer([entry.data() for entry in entries])
    else:
        width = min(COLUMNS, shutil.get_terminal_size((COLUMNS, 24)).columns)
        answer("\n".join(_told(entry, width) for entry in entries))


def _told(entry: Any, width: int) -> str:
    from dlojz.labs.kit.source import french_spaces

    name, translation = (entry.term.fr, entry.term.en) if language() == "fr" else (entry.term.en, entry.term.fr)
    called = name if name == translation else f"{name} ({translation})"
    lab = say(en=f"lab {entry.lab}", fr=f"TP {entry.lab}")
    text = f"{called} — {entry.meaning} [{lab}]".replace("*", "")
    text = french_spaces(text) if language() == "fr" else text
    return textwrap.fill(text, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def write_book(args: Given, answer: Answer) -> None:
    """Write the book of all solutions."""
    from dlojz.labs.kit.book import make_book

    book = make_book(Path(args["out"]).expanduser(), list(args[WORDS]) or None, args["language"])
    for entry in book.missing:
        title = entry.heading(language())
        tell(
            en=f"lab {title} has no executed solution yet: it is named, without a page.",
            fr=f"le TP {title} n’a pas encore de solution exécutée : il est nommé, sans page.",
        )
    answer(f"{book.pages} pages, {format_bytes(book.size_bytes)}{say(en=':', fr=' :')} {book.first}")


def build_notebooks(args: Given, _: Answer) -> int:  # `_`: build prints on stderr, and has no answer
    """Build the notebooks of the labs from their solutions."""
    from dlojz.labs.kit.build import build

    check, force = args["check"], args["force"]
    return build(check=check, labs=list(args[WORDS]) or None, language=args["language"], force=force)


def repair_notebook(args: Given, answer: Answer) -> None:
    """Repair one notebook; its answers are kept."""
    notebooks = args[WORDS]
    if len(notebooks) != 1:
        raise refusal(
            en=f"`dlojz labs repair` repairs one notebook, but {len(notebooks)} were named: name one.",
            fr=f"`dlojz labs repair` répare un notebook, mais {len(notebooks)} ont été nommés : nommez-en un.",
        )
    from dlojz.labs.kit.build import repair

    answer(str(repair(Path(notebooks[0]))))


def copy_to(args: Given, answer: Answer) -> None:
    """Copy the student notebooks of a language into a folder."""
    from dlojz.labs.kit.source import copy_notebooks

    folders = args[WORDS] or ("dlojz-labs",)
    if len(folders) > 1:
        raise refusal(
            en=f"`dlojz labs copy` copies into one folder, but {len(folders)} were named: name one.",
            fr=f"`dlojz labs copy` copie dans un seul dossier, mais {len(folders)} ont été nommés : nommez-en un.",
        )
    copied = copy_notebooks(Path(folders[0]).expanduser(), args["language"] or language())
    if args["json"]:
        answer({"folder": str(copied.folder), "copied": list(copied.copied), "kept": list(copied.kept)})
        return
    kept_count = len(copied.kept)
    answer(
        say(
            en=f"{copied.folder}: {len(copied.copied)} notebooks copied"
            + (f", {kept_count} left as they were ({', '.join(copied.kept)})." if kept_count else "."),
            fr=f"{copied.folder} : {len(copied.copied)} notebooks copiés"
            + (f", {kept_count} laissés tels quels ({', '.join(copied.kept)})." if kept_count else "."),
        )
    )
    start = _start_of_jupyterlab(copied.folder)
    answer(say(en=f"Next: {start}", fr=f"Ensuite : {start}"))


def _start_of_jupyterlab(notebooks: Path) -> str:
    """Write the settings of JupyterLab beside copied notebooks; return the command that opens them.

    JupyterLab then asks nothing about news, and its terminals are no login shells, which would set PATH anew on many
    systems: they find `dlojz` and `torchrun`.
    """
    # target/notebooks/LANGUAGE → target, the folder that JupyterLab is started in.
    root = notebooks.parents[1]
    settings = root / ".jupyterlab" / "overrides.json"
    settings.parent.mkdir(exist_ok=True)
    write_atomic(settings, '{"@jupyterlab/apputils-extension:notification": {"fetchNews": "false"}}\n')
    programs = shlex.quote(str(Path(sys.executable).parent))
    return (
        f'cd {shlex.quote(str(root))} && PATH={programs}:"$PATH" jupyter lab '
        f'--LabApp.app_settings_dir="$PWD/.jupyterlab" --ServerApp.terminado_settings=shell_command=bash '
        f"--LabApp.default_url=/lab/tree/notebooks/{notebooks.name}/contents.ipynb"
    )


def _lab_and_path(args: Given, action: str, name: str = "") -> tuple[str, Path]:
    """Read the words of an action on the training script: a lab, and a path, by default `training_LAB`."""
    words = args[WORDS]
    if not 1 <= len(words) <= 2:
        example = f"dlojz labs {action} 03 {Path('training_03') / name}"
        raise refusal(
            en=f"`dlojz labs {action}` takes a lab and a path, but {len(words)} words were received: write e.g. "
            f"`{example}`.",
            fr=f"`dlojz labs {action}` prend un TP et un chemin, mais {len(words)} mots ont été reçus : écrivez par "
            f"exemple `{example}`.",
        )
    lab, *path = words
    return lab, Path(path[0] if path else f"training_{lab}/{name}").expanduser()


def write_training_script(args: Given, answer: Answer) -> None:
    """Write the training script of a lab into a folder."""
    from dlojz.labs.script.growing_script import LAYOUTS, write_script

    lab, folder = _lab_and_path(args, "script")
    path = write_script(lab, folder, args["language"] or language(), solved=args["solution"])
    name = shlex.quote(str(path))
    processes, options = LAYOUTS.get(int(lab), (1, ()))
    # LAYOUTS has only labs whose script runs on several processes.
    text = path.read_text(encoding="utf-8")
    distributed = processes > 1 or "init_process_group" in text
    start = f"dlojz run {name}" + (f" --nproc {processes}" if distributed else "")
    start += f" -- {' '.join(options)}" if options else ""
    todo = text.count("# TODO")
    judge = f"dlojz labs judge {lab} {name}"
    todo_text = say(en=f"{todo} places marked TODO", fr=f"endroits marqués TODO : {todo}")
    edit = say(en=f"edit it ({todo_text}), then ", fr=f"éditez-le ({todo_text}), puis ")
    answer(
        say(
            en=f"{path}\nNext: {edit if todo else ''}{start}\nDone? {judge}",
            fr=f"{path}\nEnsuite : {edit if todo else ''}{start}\nTerminé ? {judge}",
        )
    )


def judge_training_script(args: Given, answer: Answer) -> int:
    """Run the training script of a lab as the lab asks for, and judge what it does."""
    from dlojz.labs.script.growing_script import NAME
    from dlojz.labs.script.script_judge import judge_script

    lab, path = _lab_and_path(args, "judge", NAME)
    placement = {name: args[name] for name in ("on", "machine", "device") if name in args}
    # Titles of the runs go to stderr: stdout has the verdict alone.
    verdict = judge_script(lab, path, lambda title: print(f"… {title}", file=sys.stderr, flush=True), **placement)
    answer({"state": verdict.state, "message": verdict.message} if args["json"] else str(verdict))
    return int(verdict.state != "right")


class LabsAction(NamedTuple):
    """An action of `dlojz labs`: its function, its options, and whether it takes further words."""

    call: Callable[[Given, Answer], int | None]
    options: tuple[str, ...]
    takes_words: bool = True


ACTIONS = {
    "list": LabsAction(show_list, ("json",), takes_words=False),
    "progress": LabsAction(show_progress, ("html", "root", "json"), takes_words=False),
    "glossary": LabsAction(show_glossary, ("json",)),
    "copy": LabsAction(copy_to, ("language", "json")),
    "script": LabsAction(write_training_script, ("language", "solution")),
    "judge": LabsAction(judge_training_script, ("on", "machine", "device", "json")),
    "book": LabsAction(write_book, ("out", "language")),
    "repair": LabsAction(repair_notebook, ()),
    "build": LabsAction(build_notebooks, ("check", "language", "force")),
}


@verb(
    "labs",
    """
    [ACTION [WORD…]]  list (default), progress, copy [DIR], script LAB [DIR], judge LAB [FILE],
        glossary [WORD], book [LAB…], repair NOTEBOOK, build [LAB…]
        // list (par défaut), progress, copy [DOSSIER], script TP [DOSSIER], judge TP [FICHIER],
        glossary [MOT], book [TP…], repair NOTEBOOK, build [TP…]
    --check  build: compare only // build : comparer seulement
    --language en|fr  build, book: one language only; copy, script: that of what is copied
        // build, book : une seule langue ; copy, script : celle de ce qui est copié
    --solution  script: as the lab leaves it, nothing left to do // script : tel que le TP le laisse, complet
    --force  build: execute every solution again // build : réexécuter chaque solution
    --out FOLDER = book  book: folder to write // book : dossier à écrire
    --on local|slurm  judge: where the script runs // judge : où le script s’exécute
    --machine NAME  judge: machine file of the cluster, see `dlojz machines`
        // judge : fichier de machine du cluster, voir `dlojz machines`
    --device cpu|cuda  judge: what it runs on, by default the CPU // judge : sur quoi, par défaut le processeur
    --html FILE  progress: page to write // progress : page à écrire
    """,
    ROOT,
    JSON,
    en="""dlojz labs: the labs in their order, with their duration and what comes before each.
dlojz labs progress: exercises done, predictions made, and what comes next.
dlojz labs copy [DIR]: the student's notebooks of a language in a folder, by default dlojz-labs; a notebook that is
there already is left as it is.
dlojz labs script LAB [DIR]: a training script in plain PyTorch (train.py) that grows from lab 00 (41 lines, one
process) to lab 12 (DDP, FSDP2, 1F1B, tensor parallelism alone or with FSDP2, experts, int8, pruning, DeepSpeed,
Accelerate, by a flag): that of the lab before, with what this lab adds left to do; with --solution, all of it. A
script that is there already is left as it is.
dlojz labs judge LAB [FILE]: run that script on 1, 2 or 4 processes as the lab asks for, and say what is right or wrong:
losses as on one process, samples, shards, messages, checkpoints; exit code 1 where something is wrong.
dlojz labs glossary [WORD]: a word of the labs in English and French; without a word, all of them.
dlojz labs book [LAB…]: every executed solution as a static page, with contents and glossary; no network is needed.
dlojz labs repair NOTEBOOK: restore every cell that is not an answer as it was handed out; answers and added cells are
kept, and so is a copy of the notebook as it was.
dlojz labs build [LAB…]: for authors. Write the notebooks of the labs from solutions/NN_name.py, student and solution,
in French and English. Solutions are executed where their code has changed, and keep their outputs.""",
    fr="""dlojz labs : les TP dans leur ordre, avec leur durée et ce qui précède chacun.
dlojz labs progress : exercices réussis, prédictions faites, et la suite.
dlojz labs copy [DOSSIER] : les notebooks de l’étudiant, dans une langue, copiés dans un dossier, par défaut
dlojz-labs ; un notebook qui s’y trouve déjà reste tel quel.
dlojz labs script TP [DOSSIER] : un script d’entraînement en PyTorch pur (train.py) qui grandit du TP 00 (41 lignes,
un processus) au TP 12 (DDP, FSDP2, 1F1B, Tensor Parallelism seul ou avec FSDP2, experts, int8, élagage, DeepSpeed,
Accelerate, par une option) : celui du TP précédent, où ce que ce TP ajoute reste à écrire ; avec --solution, en
entier. Un script qui s’y trouve déjà reste tel quel.
dlojz labs judge TP [FICHIER] : exécuter ce script sur 1, 2 ou 4 processus comme le TP le demande, et dire ce qui est
juste ou faux : pertes comme sur un processus, échantillons, fragments, messages, checkpoints ; code de sortie 1 si
quelque chose est faux.
dlojz labs glossary [MOT] : un mot des TP, en français et en anglais ; sans mot, tous.
dlojz labs book [TP…] : chaque solution exécutée en page statique, avec sommaire et glossaire, sans réseau.
dlojz labs repair NOTEBOOK : rétablir, telle qu’elle a été distribuée, chaque cellule qui n’est pas une réponse ; les
réponses et les cellules ajoutées sont gardées, ainsi qu’une copie du notebook d’avant.
dlojz labs build [TP…] : pour les auteurs. Écrire les notebooks des TP à partir de solutions/NN_nom.py, étudiant et
solution, en français et en anglais. Les solutions dont le code a changé sont exécutées et gardent leurs sorties.""",
    examples="""
    dlojz labs
    dlojz labs progress --html progress.html
    dlojz labs copy dlojz-labs --language en
    dlojz labs script 03 my_training
    dlojz labs judge 03 my_training/train.py
    dlojz labs judge 07 my_training/train.py --on slurm --machine local --device cuda
    dlojz labs glossary bubble
    dlojz labs book --out book
    dlojz labs repair notebooks/en/00_getting_started.ipynb
    dlojz labs build 01
    dlojz labs build --check # exit code 1 if a notebook differs // code de sortie 1 si un notebook diffère
    """,
)
def labs_command(args: Given, answer: Answer) -> int | None:
    """Show the labs, a student's progress, the glossary; copy, build, check or repair notebooks; make the book."""
    name, *words = args.pop(WORDS, ("list",))
    if name not in ACTIONS:
        raise LabError(one_of("action of `dlojz labs`", name, ACTIONS))
    action = ACTIONS[name]
    # The verb takes the options of all its actions; one that this action has no use for is refused.
    for option in args:
        if option not in action.options:
            owners = ", ".join(
                f"`dlojz labs {action_name}`" for action_name, entry in ACTIONS.items() if option in entry.options
            )
            raise refusal(
                en=f"--{option} belongs to {owners}: leave it out.", fr=f"--{option} va avec {owners} : retirez-le."
            )
    if words and not action.takes_words:
        raise refusal(
            en=f"`dlojz labs {name}` takes no further word, but {words[0]!r} was received.",
            fr=f"`dlojz labs {name}` ne prend pas d’autre mot, mais {words[0]!r} a été reçu.",
        )
    # The action finds its own words, without its name.
    args[WORDS] = tuple(words)
    return action.call(args, answer)


@verb(
    "diff",
    "NOTEBOOK EXERCISE  file of the notebook, then id of the exercise // fichier du notebook, puis nom de l’exercice",
    JSON,
    en="""Lay a student's answer to an exercise beside the solution, for the exercise's part of its cell only.

The notebook is read as it was saved; nothing of it is executed. In a notebook:
labs.diff("attention"), or run.diff() for the exercise that a run belongs to.""",
    fr="""Mettre la réponse d’un étudiant à un exercice à côté de la solution, pour la seule partie à écrire.

Le notebook est lu tel qu’il a été enregistré ; rien n’en est exécuté. Dans un notebook :
labs.diff("attention"), ou run.diff() pour l’exercice auquel se rattache une exécution.""",
    examples="""
    dlojz diff notebooks/en/01_big_models.ipynb attention
    dlojz diff notebooks/en/01_big_models.ipynb attention --json
    """,
)
def diff_command(args: Given, answer: Answer) -> None:
    """Show an answer beside the solution."""
    from dlojz.labs.kit.lab import diff

    notebook, exercise = args[WORDS]
    difference = diff(exercise, Path(notebook))
    answer(difference.to_dict() if args["json"] else repr(difference))
