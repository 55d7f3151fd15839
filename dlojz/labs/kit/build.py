"""Build the notebooks from their sources: execute, write, check, repair, and the instructors' page.

`dlojz labs build` writes the four notebooks of every lab, the page of contents and the glossary; building twice changes
no byte, and a check writes nothing. Solutions are executed where they lie, and only where their code has changed:
stored outputs carry the checksum of their code. Whether they still hold is tested by nbval.

`dlojz labs repair` gives a damaged notebook its original cells back and keeps the answers: added cells stay behind the
cell they followed, and the notebook as it was is kept beside it.

Of `docs/instructors.md`, only what stands between its two marks is generated.
"""

from __future__ import annotations

import copy
import hashlib
import os
import re
import shutil
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlojz.base.contract import parse_json
from dlojz.base.display_hook import QUIET
from dlojz.base.errors import LabError
from dlojz.base.files import CHECKOUT, COURSE, write_atomic
from dlojz.base.language import LANGUAGES, Language, Sentences, language, one_of
from dlojz.labs.kit.contents import (
    CONTENTS,
    GLOSSARY,
    LABS,
    PROGRAMMES,
    Duration,
    LabEntry,
    Room,
    duration,
    entry_of_file,
    glossary_markdown,
    linked,
    read_durations,
    read_rooms,
    total_minutes,
)
from dlojz.labs.kit.lab import NUMBERS, content_of
from dlojz.labs.kit.source import (
    MAX_NOTEBOOK_BYTES,
    LabSource,
    cell_text,
    compose,
    empty_notebook,
    french_spaces,
    read_source,
)
from dlojz.libraries.library_catalogue import LIBRARIES

TEXTS = Sentences(Path(__file__).with_name("data") / "build.md")

CELL_TIMEOUT_S = 900
KERNEL_START_S = 300
_WIDGET = "application/vnd.jupyter.widget-view+json"


def code_sha256(notebook: Any) -> str:
    """Checksum of the code cells of a notebook, in order."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\0".join(code).encode()).hexdigest()


def execute(notebook: Any, path: Path, *, runs_root: Path, allow_errors: bool = False) -> Any:
    """A copy of the notebook with its outputs.

    Args:
        path: Where the notebook lies or will lie: its folder becomes the working folder, its name gives the language.
        runs_root: Folder of the runs it makes or finds.
        allow_errors: Go on after a cell that raises.

    Raises:
        LabError: naming the notebook and the cell that failed.
    """
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    result = copy.deepcopy(notebook)
    path.parent.mkdir(parents=True, exist_ok=True)
    client = NotebookClient(
        result,
        timeout=CELL_TIMEOUT_S,
        startup_timeout=KERNEL_START_S,
        kernel_name="python3",
        allow_errors=allow_errors,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(path.parent)}},
    )
    try:
        # As under JupyterLab, so that the notebook finds its own path, and with it its language.
        variables = {"JPY_SESSION_NAME": str(path.resolve()), **own_folders(runs_root), QUIET: "off"}
        client.execute(env={**os.environ, **variables})
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        raise LabError(f"{path.parent.name}/{path.name} does not run to its end:\n{error}") from None
    # nbclient writes the version of the kernel's Python there, which differs between machines.
    result.metadata = copy.deepcopy(notebook.metadata)
    for cell in result.cells:
        if cell.cell_type == "code":
            cell.outputs = [static_output for output in cell.outputs if (static_output := _still(output))]
    result.metadata["dlojz"]["executed_sha256"] = code_sha256(notebook)
    return result


def own_folders(runs_root: Path) -> dict[str, str]:
    """Environment variables by which a notebook keeps its runs and its calibration apart from the user's."""
    return {"DLOJZ_RUNS": str(runs_root), "XDG_CONFIG_HOME": str(runs_root.with_name(runs_root.name + "-config"))}


def _still(output: Any) -> Any | None:
    """An output that a reader without a kernel can see: the static twin of a widget, nothing where it has none.

    Of a figure the PNG stays, with its description: the HTML beside it has the same picture again.
    """
    data = output.get("data", {})
    if "image/png" in data:
        data.pop("text/html", None)
    if _WIDGET in data:
        del data[_WIDGET]
        return output if "text/html" in data else None
    return output


def with_stored_outputs(notebook: Any, stored: Any) -> Any | None:
    """A copy of the notebook with the outputs of an earlier execution; None where its code has changed since."""
    if stored.metadata.get("dlojz", {}).get("executed_sha256") != code_sha256(notebook):
        return None
    outputs = [(cell.outputs, cell.execution_count) for cell in stored.cells if cell.cell_type == "code"]
    result = copy.deepcopy(notebook)
    cells = [cell for cell in result.cells if cell.cell_type == "code"]
    # A cell without a count was never executed: nothing of such a notebook is kept.
    if len(cells) != len(outputs) or any(count is None for _, count in outputs):
        return None
    for cell, (cell_outputs, count) in zip(cells, outputs, strict=True):
        cell.outputs, cell.execution_count = copy.deepcopy(cell_outputs), count
    result.metadata["dlojz"]["executed_sha256"] = code_sha256(notebook)
    return result


def without_outputs(notebook: Any) -> Any:
    """A copy without outputs, execution counts and the checksum that vouches for them."""
    bare = copy.deepcopy(notebook)
    bare.metadata.get("dlojz", {}).pop("executed_sha256", None)
    for cell in bare.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return bare


PROGRESS_CODE = "from dlojz import labs\n\nlabs.overview()"


def pages(root: Path, language: Language) -> Iterator[tuple[Path, Any]]:
    """Where each page of a language lies in a checkout, and the notebook."""
    folder = root / "notebooks" / language
    yield folder / CONTENTS, contents_notebook(language)
    yield folder / GLOSSARY, glossary_notebook(language)


def contents_notebook(language: Language) -> Any:
    """All labs with links, durations and what comes before, and a cell that shows the student's progress."""
    before, after = contents_markdown(language)
    cells = [("introduction", before), ("progress", None), ("further", after)]
    return _notebook("contents", language, cells)


def glossary_notebook(language: Language) -> Any:
    """The glossary, one cell per initial letter."""
    texts = glossary_markdown(language)
    return _notebook("glossary", language, [(f"part-{number:02d}", text) for number, text in enumerate(texts)])


def _notebook(page: str, language: Language, cells: list[tuple[str, str | None]]) -> Any:
    import nbformat.v4

    notebook = empty_notebook(language=language, page=page)
    for name, text in cells:
        # No text: the cell of the progress. Ids that are given: nbformat would draw new ones at each build.
        cell = (
            nbformat.v4.new_code_cell(PROGRESS_CODE, id=f"{page}-{name}")
            if text is None
            else nbformat.v4.new_markdown_cell(text, id=f"{page}-{name}")
        )
        notebook.cells.append(cell)
    return notebook


def contents_markdown(language: Language) -> tuple[str, str]:
    """The page of contents as Markdown: what stands before the student's progress, and what stands after it."""
    french, start_lab, (half, two) = language == "fr", LABS[0], PROGRAMMES[:2]
    page = Path(__file__).with_name("data") / f"contents_page.{language}.md"
    text = (
        page.read_text(encoding="utf-8")
        .rstrip("\n")
        .format(
            labs=len(LABS),
            minutes=duration(total_minutes()),
            table=pages_labs_table(language),
            start_heading=start_lab.heading(language),
            start_notebook=start_lab.notebook,
            half_days=half.days[french],
            half_labs=listed(half.numbers, language),
            two_days=two.days[french],
            two_labs=listed([number for number in two.numbers if number not in half.numbers], language),
            later_labs=listed([entry.number for entry in LABS if entry.number > max(two.numbers)], language),
            glossary=GLOSSARY,
        )
    )
    before, after = (french_spaces(text) if french else text).split("\n\n<!-- progress -->\n\n")
    return before, after


def pages_labs_table(language: Language) -> str:
    """The labs as a Markdown table: link, what it teaches, duration, labs before it, processes."""
    french = language == "fr"
    titles = (
        ("TP", "vous y apprenez", "durée", "après", "processus")
        if french
        else ("lab", "what you learn", "time", "after", "processes")
    )
    lines = ["| " + " | ".join(titles) + " |", "|:--|:--|:--|:--|--:|"]
    for entry in LABS:
        cells = (
            f"[{entry.heading(language)}]({entry.notebook})",
            entry.teaches[french],
            duration(entry.minutes),
            ", ".join(entry.after) or "—",
            str(entry.processes),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def listed(numbers: Sequence[str], language: Language) -> str:
    """Numbers of labs as one says them, e.g. `00, 02 and 03`; three and more that follow one another as `04 to 08`."""
    french = language == "fr"
    parts: list[list[str]] = []
    # Runs of neighbouring numbers.
    for number in numbers:
        if parts and int(number) == int(parts[-1][-1]) + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    words: list[str] = []
    for part in parts:
        words += [f"{part[0]} {'à' if french else 'to'} {part[-1]}"] if len(part) > 2 else part
    *head, tail = words
    return f"{', '.join(head)} {'et' if french else 'and'} {tail}" if head else tail


STUDENTS = 10
"""Of the class for which a hub is sized as an example."""
PAGE = Path("docs") / "instructors.md"
BEGIN, END = "<!-- labs: generated by `dlojz labs build` -->", "<!-- /labs -->"
_BETWEEN = re.compile(rf"(?<={re.escape(BEGIN)}\n).*?(?={re.escape(END)})", re.DOTALL)


def with_table(text: str) -> str:
    """The instructor's page with the table as it must be now; as it is where it has no place for one."""
    # A function: in a replacement text, backslashes would be escapes.
    return _BETWEEN.sub(lambda _: instructors_labs_table(), text)


def instructors_labs_table() -> str:
    """The labs as a Markdown table for who teaches, how its figures were measured, what a hub needs, and choices."""
    times, rooms = read_durations(), read_rooms()
    # A sum is given only where every lab was measured.
    disk = _mib(sum(room.runs_bytes for room in rooms.values())) if _is_whole(rooms) else "—"
    lines = [
        "| lab | class | exercises, predictions | after | ranks | solution executes in | memory | processes | disk "
        "| campaign |",
        "|:--|:--|--:|:--|--:|--:|--:|--:|--:|:--|",
        *(_row(entry, times.get(entry.number), rooms.get(entry.number)) for entry in LABS),
        f"| all | {duration(total_minutes())} | | | | {_sum(times)} | | | {disk} | |",
    ]
    texts = (_how_long(times), _how_much(rooms), *([_hub(rooms)] if rooms else []))
    filled = (textwrap.fill(text, 120, break_on_hyphens=False) for text in texts)
    return "\n\n".join(["\n".join(lines), *filled, _programmes()]) + "\n"


def _row(entry: LabEntry, time: Duration | None, room: Room | None) -> str:
    counted = "—"
    if entry.number in NUMBERS:
        content = content_of(entry.number)
        counted = f"{len(content.EXERCISES)}, {len(content.PREDICTIONS)}"
    cells = (
        f"{entry.number} {entry.title.en}",
        duration(entry.minutes),
        counted,
        ", ".join(entry.after) or "—",
        str(entry.processes),
        "—" if time is None else f"{time.elapsed_s:.0f} s ({time.processor_s:.0f} s)",
        *(("—", "—", "—") if room is None else (_gib(room.memory_bytes), str(room.processes), _mib(room.runs_bytes))),
        ", ".join(f"`{name}`" for name in entry.campaigns) or "—",
    )
    return "| " + " | ".join(cells) + " |"


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"


def _mib(count: float) -> str:
    return f"{count / 2**20:.1f} MiB"


def _is_whole(measured: Mapping[str, object]) -> bool:
    return set(measured) == {entry.number for entry in LABS}


def _sum(times: Mapping[str, Duration]) -> str:
    if not _is_whole(times):
        return "—"
    elapsed_s = sum(time.elapsed_s for time in times.values())
    return f"{elapsed_s / 60:.0f} min ({sum(time.processor_s for time in times.values()) / 60:.0f} min)"


def _how_long(times: Mapping[str, Duration]) -> str:
    if not times:
        return "The solutions have not been timed yet: `python benchmarks/lab_durations.py`."
    cores = max(time.cores for time in times.values())
    load = max(time.load for time in times.values())
    text = (
        f"*solution executes in*: elapsed seconds on {cores} cores, and in parentheses processor seconds of all its "
        "processes together, from an empty folder of runs (`python benchmarks/lab_durations.py`), with "
        f"{_libraries(times)}."
    )
    # More than two processes wanted each core.
    if load > 2 * cores:
        text += f" The machine had other work to do, with a load of up to {load:.0f}: alone, the labs elapse faster."
    return text


def _how_much(rooms: Mapping[str, Room]) -> str:
    if not rooms:
        return "Memory, processes and disk have not been measured: `python benchmarks/lab_durations.py --room`."
    return (
        "*memory*, *processes*: the most that one student's kernel and all that it starts take at once (ranks, those "
        "who watch over them, launchers of runs; libraries in memory counted once). *disk*: their folder of runs at "
        f"the end (`python benchmarks/lab_durations.py --room`), with {_libraries(rooms)}."
    )


def _hub(rooms: Mapping[str, Room]) -> str:
    """What to count for a student on a shared machine."""
    # These two need not be the same lab.
    largest = max(rooms, key=lambda number: rooms[number].memory_bytes)
    busiest = max(rooms, key=lambda number: rooms[number].processes)
    memory_bytes, processes = rooms[largest].memory_bytes, rooms[busiest].processes
    return (
        f"To size a hub, count for each student the largest *memory* and *processes* of the labs you teach: at most "
        f"{_gib(memory_bytes)} (lab {largest}) and {processes} processes (lab {busiest}), so {STUDENTS} students take "
        f"up to {_gib(STUDENTS * memory_bytes)} and {STUDENTS * processes} processes at once. A kernel left open keeps "
        "what it holds: have finished notebooks shut down."
    )


def _libraries(measured: Mapping[str, Duration] | Mapping[str, Room]) -> str:
    """Which of the optional libraries were there for every lab."""
    titles = [
        library.title
        for library in LIBRARIES.values()
        if all(library.title in record.libraries for record in measured.values())
    ]
    if not titles:
        return "none of the optional libraries installed"
    *head, tail = titles
    return f"the optional {', '.join(head)} and {tail} installed" if head else f"the optional {tail} installed"


def _programmes() -> str:
    """Labs for some days, with what they take together."""
    lines = []
    for programme in PROGRAMMES:
        labs = "all of them" if len(programme.numbers) == len(LABS) else listed(programme.numbers, "en")
        without = (
            f"; {listed(programme.without, 'en')} first for those who do not know attention"
            if programme.without
            else ""
        )
        lines.append(f"- **{programme.days.en.capitalize()}** ({duration(programme.minutes)} of lab): {labs}{without}.")
    return "\n".join(lines)


@dataclass(frozen=True)
class Target:
    """One notebook to generate."""

    source: LabSource
    language: Language
    student: bool
    path: Path

    def composed(self) -> Any:
        """The notebook as the source says it, without outputs."""
        notebook = compose(self.source, self.language, student=self.student)
        return linked(notebook, self.source.path.stem, self.language, student=self.student)


def build(
    check: bool = False,
    labs: Iterable[str] | None = None,
    language: str | None = None,
    *,
    force: bool = False,
    root: Path | None = None,
) -> int:
    """Generate the notebooks of the labs from their sources; 0 when all is well, 1 when a check finds a difference.

    Args:
        check: Write nothing; say which files differ from what the sources give.
        labs: Numbers of the labs, e.g. `["01"]`; by default all.
        language: `en` or `fr`; by default both.
        force: Execute every solution again, also where its code has not changed.
        root: The checkout; by default the one this package lies in.

    Raises:
        LabError: if a source is not legal, a lab or language is unknown, or a solution does not run to its end.
    """
    root = root or CHECKOUT
    if language is not None and language not in LANGUAGES:
        raise LabError(one_of("language", language, LANGUAGES))
    chosen = [name for name in LANGUAGES if language in (None, name)]
    targets = list(_targets(root, _sources(root, labs), chosen))
    # Contents, glossary and the instructors' page belong to the whole set: a build of single labs leaves them.
    page_texts = dict(_pages(root, targets, chosen)) if labs is None else {}
    if not check:
        # One folder of runs for all: what one notebook has trained, the same notebook in another language finds.
        with tempfile.TemporaryDirectory(prefix="dlojz-labs-") as runs_root:
            for target in targets:
                _write(target, Path(runs_root), force=force)
        for path, text in page_texts.items():
            _write_text(path, text)
        return 0
    problems = [problem for target in targets if (problem := _difference(target))]
    problems += [problem for path, text in page_texts.items() if (problem := _page_difference(path, text))]
    # What no source gives can only be told where all sources were read.
    if labs is None:
        problems += _strays(root, targets, page_texts)
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        print("run `dlojz labs build`", file=sys.stderr)
    return 1 if problems else 0


def _sources(root: Path, labs: Iterable[str] | None) -> list[LabSource]:
    folder = root / "solutions"
    sources = [read_source(path) for path in sorted(folder.glob("*.py"))]
    if not sources:
        raise LabError(f"{folder} holds no lab: the labs are built from a checkout of the course.")
    by_number = {source.number: source for source in sources}
    for number in labs or ():
        if number not in by_number:
            raise LabError(one_of("lab", number, by_number))
    return sources if labs is None else [by_number[number] for number in labs]


def _targets(root: Path, sources: Iterable[LabSource], languages: Iterable[Language]) -> Iterator[Target]:
    for source in sources:
        for language in languages:  # noqa: F402
            for folder in ("notebooks", "solutions"):
                # Both folders have the same names; student notebooks are in notebooks/.
                path = root / folder / language / source.notebook_name
                yield Target(source, language, folder == "notebooks", path)


def _write(target: Target, runs_root: Path, *, force: bool) -> None:
    notebook = target.composed()
    if not target.student:
        stored = None if force else _stored(target.path)
        stored_copy = with_stored_outputs(notebook, stored) if stored is not None else None
        if stored_copy is None:
            print(f"executing {_short(target.path)}", file=sys.stderr)
        notebook = stored_copy if stored_copy is not None else execute(notebook, target.path, runs_root=runs_root)
    _write_text(target.path, _serialised(notebook))


def _write_text(path: Path, text: str) -> None:
    # A file that is right already keeps its date.
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
        print(f"wrote {_short(path)}", file=sys.stderr)


def _pages(root: Path, targets: list[Target], languages: Iterable[Language]) -> Iterator[tuple[Path, str]]:
    """Contents, glossary and the instructor's table, where labs of the set are there to be listed."""
    if not any(entry_of_file(target.source.path.stem) for target in targets):
        return
    for language in languages:  # noqa: F402
        for path, notebook in pages(root, language):
            yield path, _serialised(notebook)
    instructors = root / PAGE
    if instructors.is_file():
        yield instructors, with_table(instructors.read_text(encoding="utf-8"))


def _page_difference(path: Path, text: str) -> str | None:
    is_same = path.is_file() and path.read_text(encoding="utf-8") == text
    return None if is_same else f"{_short(path)} differs from what the labs and the glossary give."


def _difference(target: Target) -> str | None:
    """What is wrong with one generated file, or None."""
    name = _short(target.path)
    stored = _stored(target.path)
    if stored is None:
        return f"{name} is missing or is no notebook."
    expected = target.composed()
    if target.student:
        is_same = target.path.read_text(encoding="utf-8") == _serialised(expected)
        return None if is_same else f"{name} differs from {target.source.path.name}."
    # The outputs of a solution are not compared, but whether they belong to this code, below.
    if _serialised(without_outputs(stored)) != _serialised(expected):
        return f"{name} differs from {target.source.path.name}."
    if stored.metadata["dlojz"].get("executed_sha256") != code_sha256(expected):
        return f"{name} holds outputs of an older {target.source.path.name}."
    if any(cell.cell_type == "code" and cell.execution_count is None for cell in stored.cells):
        return f"{name} has cells that were not executed."
    return None


def _strays(root: Path, targets: list[Target], page_paths: Iterable[Path]) -> list[str]:
    expected = {*(target.path for target in targets), *page_paths}
    notebook_paths = {path for folder in ("notebooks", "solutions") for path in (root / folder).glob("*/*.ipynb")}
    languages = {target.language for target in targets}
    return [
        f"{_short(path)} has no source: remove it."
        for path in sorted(notebook_paths - expected)
        if path.parent.name in languages
    ]


def _stored(path: Path) -> Any | None:
    import nbformat

    try:
        return nbformat.read(path, as_version=4)
    except (OSError, ValueError, nbformat.ValidationError):
        return None


def _serialised(notebook: Any) -> str:
    import nbformat

    # One newline at the end, whatever the version of nbformat writes.
    return str(nbformat.writes(notebook)).rstrip("\n") + "\n"


def _short(path: Path) -> str:
    return "/".join(path.parts[-3:])


_STUB = re.compile(r'labs\.NotDone\("[a-z0-9-]+"\)|^\s*\.\.\.,  # TODO ?: ', re.MULTILINE)
"""What the builder leaves where the student has to write (`dlojz.labs.kit.source`)."""
_CELL_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class Repaired:
    """What was done to a notebook.

    Args:
        restored: ids of the cells whose text was not the one handed out.
        returned: ids of the cells that were missing.
        answers: how many answers were kept.
        added: how many cells of the student's own were kept.
        before: the notebook as it was; None where nothing had to be done.
    """

    path: Path
    restored: tuple[str, ...]
    returned: tuple[str, ...]
    answers: int
    added: int
    before: Path | None

    def __str__(self) -> str:
        if self.before is None:
            return TEXTS.say("repair", "nothing to repair", name=self.path.name, answers=self.answers)
        restored, returned = ", ".join(self.restored) or "—", ", ".join(self.returned) or "—"
        return TEXTS.say(
            "repair",
            "repaired",
            name=self.path.name,
            restored=restored,
            returned=returned,
            answers=self.answers,
            added=self.added,
            copy=self.before.name,
        )


def repair(path: Path, handed_out: Path | None = None) -> Repaired:
    """Restore every cell of a notebook that is not an answer.

    Args:
        handed_out: The notebook it was made from; by default the one of the same name in `notebooks/` of the course,
            in the language of the student's (its metadata, else the name of its folder, else the general choice).

    Raises:
        LabError: if there is no such notebook, or it cannot be read or written. A notebook that is no longer JSON has
            no cells one could tell apart: the sentence says how to begin anew.
    """
    student_notebook = _read(path)
    shipped = _read(handed_out or _handed_out(path, student_notebook))
    cells = student_notebook["cells"]
    ids = Counter(cell["id"] for cell in cells if isinstance(cell.get("id"), str))
    # Reversed, so that the first of two cells with one id stays in the dict.
    by_id = {cell["id"]: cell for cell in reversed(cells) if isinstance(cell.get("id"), str)}
    shipped_ids = {cell["id"] for cell in shipped["cells"]}
    restored: list[str] = []
    returned: list[str] = []
    added_cells = _own_cells(cells, shipped_ids)
    # Cells that were added above the first one of the course.
    result: list[dict[str, Any]] = list(added_cells[None])
    answers = 0
    for original in shipped["cells"]:
        student_cell = by_id.get(original["id"])
        if student_cell is None:
            returned.append(original["id"])
            result.append(original)
        # An exercise: the student's cell stays whatever it holds, and counts as an answer where it was changed.
        elif _STUB.search(cell_text(original)) and student_cell["cell_type"] == "code":
            answers += cell_text(student_cell) != cell_text(original)
            result.append(student_cell)
        elif (cell_text(student_cell), student_cell["cell_type"]) == (cell_text(original), original["cell_type"]):
            result.append(student_cell)
        else:
            restored.append(original["id"])
            result.append(original)
        result += added_cells.get(original["id"], [])
    # Nothing to repair: all cells of the course in their order, no id twice, and the course's metadata.
    order = [cell["id"] for cell in cells if isinstance(cell.get("id"), str) and cell["id"] in shipped_ids]
    sound = order == [cell["id"] for cell in shipped["cells"]] and max(ids.values(), default=1) == 1
    course_metadata = {
        name: shipped["metadata"][name] for name in ("dlojz", "kernelspec") if name in shipped["metadata"]
    }
    sound = sound and {**student_notebook["metadata"], **course_metadata} == student_notebook["metadata"]
    added_count = sum(map(len, added_cells.values()))
    if sound and not restored and not returned:
        return Repaired(path, (), (), answers, added_count, None)
    # What was added stays behind the cell that it followed; metadata of other programs stay too.
    content = {
        **shipped,
        "metadata": {**student_notebook["metadata"], **course_metadata},
        "cells": [_sound(cell) for cell in result],
    }
    return Repaired(path, tuple(restored), tuple(returned), answers, added_count, _replace(path, content))


def _own_cells(cells: list[dict[str, Any]], shipped_ids: set[str]) -> dict[str | None, list[dict[str, Any]]]:
    """Cells that the student has added (a second cell of one id is one too), by the cell they follow."""
    added_cells: dict[str | None, list[dict[str, Any]]] = {None: []}
    anchor: str | None = None
    seen_ids: set[str] = set()
    for number, cell in enumerate(cells):
        name = cell.get("id") if isinstance(cell.get("id"), str) else None
        if name in shipped_ids and name not in seen_ids:
            anchor = name
        else:
            # An id that the format does not allow, or that is used already, gives way to a new one.
            good = isinstance(name, str) and _CELL_ID.fullmatch(name) and name not in seen_ids | shipped_ids
            fresh = str(name) if good else f"own-{number}"
            added_cells.setdefault(anchor, []).append({**cell, "id": fresh})
            name = fresh
        seen_ids.add(str(name))
    return added_cells


def _sound(cell: dict[str, Any]) -> dict[str, Any]:
    """A cell that the format allows; of one that it does not, the text."""
    from nbformat.validator import isvalid

    if isvalid(cell, ref=f"{cell['cell_type']}_cell", version=4, version_minor=5):
        return cell
    code: dict[str, Any] = {"outputs": [], "execution_count": None} if cell["cell_type"] == "code" else {}
    return {"cell_type": cell["cell_type"], "id": cell["id"], "metadata": {}, "source": cell_text(cell), **code}


def _read(path: Path) -> dict[str, Any]:
    """A notebook as JSON, its parts of the right kinds."""
    try:
        if path.stat().st_size > MAX_NOTEBOOK_BYTES:
            raise TEXTS.refusal("repair", "too large", name=path.name, max_mib=MAX_NOTEBOOK_BYTES // 2**20)
        content = parse_json(path.read_bytes())
    except OSError as error:
        raise TEXTS.refusal("repair", "cannot be read", path=path, strerror=error.strerror) from None
    except LabError:
        content = None
    if not _is_notebook(content):
        raise TEXTS.refusal("repair", "no notebook any more", name=path.name)
    notebook: dict[str, Any] = content
    return notebook


def _is_notebook(content: Any) -> bool:
    if not isinstance(content, dict) or content.get("nbformat") != 4:
        return False
    cells, metadata = content.get("cells"), content.get("metadata")
    if not isinstance(cells, list) or not isinstance(metadata, dict):
        return False
    return all(isinstance(cell, dict) and cell.get("cell_type") in ("code", "markdown", "raw") for cell in cells)


def _handed_out(path: Path, notebook: dict[str, Any]) -> Path:
    """The notebook of the course that the student's was copied from."""
    metadata = notebook["metadata"].get("dlojz")
    metadata = metadata if isinstance(metadata, dict) else {}
    clues = (metadata.get("language"), path.absolute().parent.name, language())
    chosen: Language = next(code for clue in clues for code in LANGUAGES if clue == code)
    folder = COURSE / "notebooks" / chosen
    files = {file.name: file for file in sorted(folder.glob("*.ipynb"))}
    source = metadata.get("source")
    # By the source that the metadata name: the student may have renamed the file.
    if isinstance(source, str) and (file_name := source.removesuffix(".py") + ".ipynb") in files:
        return files[file_name]
    if path.name not in files:
        raise LabError(one_of("notebook", path.name, files))
    return files[path.name]


def _replace(path: Path, content: dict[str, Any]) -> Path:
    """Write the notebook, after keeping the one that was there; returns where that is."""
    import nbformat

    notebook = nbformat.from_dict(content)
    nbformat.validate(notebook)
    number = 1
    # The first number that is free: no earlier copy is overwritten.
    while (before := path.with_name(f"{path.stem}.before-repair-{number}.ipynb")).exists():
        number += 1
    try:
        shutil.copy2(path, before)
        write_atomic(path, str(nbformat.writes(notebook)).rstrip("\n") + "\n")
    except OSError as error:
        raise TEXTS.refusal("repair", "cannot be written", path=path, strerror=error.strerror) from None
    return before
