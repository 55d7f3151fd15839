"""Commands of the labs, and texts for assistants: `dlojz labs` with its actions, `dlojz diff`, `dlojz skill`.

What is only shown changes nothing; `build --check` writes nothing and fails where a generated file differs; a repair
loses no answer. Only `build` executes solutions. The texts for assistants stand in `data/skills`.
"""

import re
import shlex
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

from dlojz.base.errors import LabError
from dlojz.base.files import write_atomic
from dlojz.base.language import format_bytes, language, one_of, say
from dlojz.base.table import Table, titles
from dlojz.cli.options import WORDS, Answer, Given, VerbOfActions, fields_of, phrase, tell, tell_written, verb

COLUMNS = 120


@verb("labs list")
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


@verb("labs progress")
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


@verb("labs glossary")
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


@verb("labs book")
def write_book(args: Given, answer: Answer) -> None:
    """Write the book of all solutions."""
    from dlojz.labs.kit.book import make_book

    book = make_book(Path(args["out"]).expanduser(), list(args[WORDS]) or None, args["language"])
    for entry in book.missing:
        title = entry.heading(language())
        tell(phrase("no executed solution", title=title))
    answer(f"{book.pages} pages, {format_bytes(book.size_bytes)}{say(en=':', fr=' :')} {book.first}")


@verb("labs build")
def build_notebooks(args: Given, _: Answer) -> int:  # `_`: build prints on stderr, and has no answer
    """Build the notebooks of the labs from their solutions."""
    from dlojz.labs.kit.build import build

    check, force = args["check"], args["force"]
    return build(check=check, labs=list(args[WORDS]) or None, language=args["language"], force=force)


@verb("labs repair")
def repair_notebook(args: Given, answer: Answer) -> None:
    """Repair one notebook; its answers are kept."""
    from dlojz.labs.kit.build import repair

    answer(str(repair(Path(args[WORDS][0]))))


@verb("labs copy")
def copy_to(args: Given, answer: Answer) -> None:
    """Copy the student notebooks of a language into a folder."""
    from dlojz.labs.kit.source import copy_notebooks

    (folder,) = args[WORDS] or ("dlojz-labs",)
    copied = copy_notebooks(Path(folder).expanduser(), args["language"] or language())
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


def _lab_and_path(args: Given, name: str = "") -> tuple[str, Path]:
    """Read a lab, and the path of its training script, by default in `training_LAB`."""
    lab, *path = args[WORDS]
    return lab, Path(path[0] if path else f"training_{lab}/{name}").expanduser()


@verb("labs script")
def write_training_script(args: Given, answer: Answer) -> None:
    """Write the training script of a lab into a folder."""
    from dlojz.labs.script.growing_script import LAYOUTS, write_script

    lab, folder = _lab_and_path(args)
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


@verb("labs judge")
def judge_training_script(args: Given, answer: Answer) -> int:
    """Run the training script of a lab as the lab asks for, and judge what it does."""
    from dlojz.labs.script.growing_script import NAME
    from dlojz.labs.script.script_judge import judge_script

    lab, path = _lab_and_path(args, NAME)
    placement = {name: args[name] for name in ("on", "machine", "device") if name in args}
    # Titles of the runs go to stderr: stdout has the verdict alone.
    verdict = judge_script(lab, path, lambda title: print(f"… {title}", file=sys.stderr, flush=True), **placement)
    answer({"state": verdict.state, "message": verdict.message} if args["json"] else str(verdict))
    return int(verdict.state != "right")


labs_command = VerbOfActions(
    "labs",
    show_list.run,
    actions=(
        *(show_list, show_progress, show_glossary, copy_to, write_training_script, judge_training_script, write_book),
        *(repair_notebook, build_notebooks),
    ),
)


@verb("diff")
def diff_command(args: Given, answer: Answer) -> None:
    """Show an answer beside the solution."""
    from dlojz.labs.kit.lab import diff

    notebook, exercise = args[WORDS]
    difference = diff(exercise, Path(notebook))
    answer(difference.to_dict() if args["json"] else repr(difference))


class Skill(NamedTuple):
    """Text that tells an assistant how to answer one kind of question: title, front matter, and the whole file.

    `folder` is the name in the front matter, which is also that of the folder it is installed in.
    """

    folder: str
    description: str
    title_en: str
    title_fr: str
    text: str


def read_skills() -> dict[str, Skill]:
    """Read the texts for assistants in the reader's language, by name; one without a French version is in English.

    `data/skills/NAME.md` begins with the front matter that assistants read (name, description on one line each), then
    `# title // titre`; `NAME.fr.md` is its French version.
    """
    skills: dict[str, Skill] = {}
    for path in sorted((Path(__file__).parent / "data" / "skills").glob("*.md")):
        name, _, into = path.stem.partition(".")
        # NAME.fr.md sorts before NAME.md: what is read first in the reader's language stays.
        if name in skills or into not in ("", language()):
            continue
        text = path.read_text(encoding="utf-8")
        head = re.match(r"---\nname: (.+)\ndescription: (.+)\n---\n\n# (.+) // (.+)\n", text)
        assert head is not None, path
        skills[name] = Skill(head[1], head[2], head[3], head[4], text)
    return skills


@verb("skill")
def skill_command(args: Given, answer: Answer) -> None:
    """Print, list or write the texts for assistants."""
    skills = read_skills()
    names = args[WORDS] or tuple(skills)
    if unknown := [name for name in names if name not in skills]:
        raise LabError(one_of(say(en="text for assistants", fr="texte pour assistants"), unknown[0], skills))
    written: dict[str, str] = {}
    if "write" in args:
        for name in names:
            path = Path(args["write"]).expanduser() / skills[name].folder / "SKILL.md"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, skills[name].text)
            written[name] = str(path)
    if args["json"]:
        answer([{"name": name, **skills[name]._asdict(), "file": written.get(name)} for name in names])
    elif written:
        answer("\n".join(written.values()))
    elif args[WORDS]:
        answer(skills[names[0]].text.rstrip("\n"))
    else:
        rows = [(name, say(en=skill.title_en, fr=skill.title_fr)) for name, skill in skills.items()]
        answer(Table(titles(en="name; question", fr="nom; question"), tuple(rows), align="l"))
