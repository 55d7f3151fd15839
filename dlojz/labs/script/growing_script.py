"""Write the training script that grows from lab 00 to lab 12, in plain PyTorch, as the labs leave it or as a task.

One source, `data/train.txt`, holds all of them. A line `#@ 03-05` begins what stands in the scripts of labs 03 to 05,
`#@ 03-` what stands from lab 03 on, `#@ 03` what stands in lab 03 alone, `#@` what stands in all. After a bar comes
what the student of the first of these labs is asked for, in English and French. A plus sign instead: it is given, in
place of what stood just before it and ends.
"""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from dlojz.base.errors import LabError
from dlojz.base.files import write_atomic
from dlojz.base.language import Language, one_of, refusal
from dlojz.labs.kit.source import in_language

SOURCE = Path(__file__).with_name("data") / "train.txt"
LAST = 12
"""The last lab that adds to the script."""
CHECKPOINTS = "13"
"""The lab after it, whose box "In your project" goes on with the script, without a task."""
NAME = "train.py"
COMMENT_WIDTH = 100
LAYOUTS = {
    3: (2, ()),
    4: (2, ("--parallel", "fsdp")),
    5: (2, ("--parallel", "1f1b", "--accumulation", "4")),
    6: (2, ("--parallel", "tp")),
    7: (4, ("--parallel", "tp-fsdp")),
    8: (2, ()),
    9: (2, ("--compress", "--fused")),
    10: (2, ("--experts", "4")),
    11: (2, ("--quantize", "--prune", "0.5")),
    12: (2, ("--parallel", "deepspeed")),
}
"""Processes and options of what a lab adds."""
_MARK = re.compile(r"#@(?: (?P<first>\d\d)(?P<to>-(?P<last>\d\d)?)?)?(?P<given> \+)?(?: \| (?P<en>.+?) // (?P<fr>.+))?")


@dataclass(frozen=True)
class ScriptPart:
    """Lines of the script that labs `first` to `last` have.

    Attributes:
        task: what the student of lab `first` is asked for, as a comment in both languages; empty where nothing.
        given: whether the student of lab `first` finds it in the script.
    """

    first: int
    last: int
    task: str
    given: bool
    lines: tuple[str, ...]


@cache
def parts_of_script() -> tuple[ScriptPart, ...]:
    """Read the source's parts, in their order."""
    parts: list[ScriptPart] = []
    for line in SOURCE.read_text(encoding="utf-8").splitlines():
        if mark := _MARK.fullmatch(line):
            first_lab = int(mark["first"] or 0)
            # `03` alone is 03 to 03; `03-`, and a mark without a number, go on to the last lab.
            last_lab = int(mark["last"] or LAST) if mark["to"] or not mark["first"] else first_lab
            task = f"# TODO: {mark['en']} // TODO : {mark['fr']}" if mark["en"] else ""
            parts.append(ScriptPart(first_lab, last_lab, task, bool(mark["given"]), ()))
        else:
            # The part that was begun last takes the line.
            part = parts.pop()
            parts.append(replace(part, lines=(*part.lines, line)))
    return tuple(parts)


def script_of(lab: int, language: Language, *, solved: bool = True) -> str:
    """Return the script at the end of a lab, or what its student begins with: the lab before's, and what is to do."""
    text = in_language("\n".join(_lines(lab, solved)), language).strip()
    return "\n".join(_wrapped(line) if "# TODO" in line else line for line in text.splitlines()) + "\n"


def _wrapped(comment: str) -> str:
    """Cut a comment into lines."""
    margin = comment[: len(comment) - len(comment.lstrip())]
    return textwrap.fill(
        comment.strip(),
        COMMENT_WIDTH,
        initial_indent=margin,
        subsequent_indent=f"{margin}# ",
        break_on_hyphens=False,
        break_long_words=False,
    )


def _lines(lab: int, solved: bool) -> Iterator[str]:
    """The script's lines, with at most two empty ones after each other."""
    base_lab = lab if solved or lab == 0 else lab - 1
    empty = 0
    parts = parts_of_script()
    for part, after in zip(parts, (*parts[1:], None), strict=True):
        task_lines = [] if base_lab == lab or part.first != lab or not part.task else [_indented(part)]
        is_provided = base_lab < lab and part.given and part.first == lab
        # What ends with the lab before, in front of a part that this lab gives, gives way to it.
        replaced = base_lab < lab and part.last == base_lab and after is not None and after.given and after.first == lab
        is_included = is_provided or (part.first <= base_lab <= part.last and not replaced)
        for line in [*task_lines, *(part.lines if is_included else ())]:
            empty = 0 if line else empty + 1
            if empty <= 2:
                yield line


def _indented(part: ScriptPart) -> str:
    begin = next(line for line in part.lines if line)
    margin = begin[: len(begin) - len(begin.lstrip())]
    return margin + part.task


def number_of_lab(lab: str) -> int:
    """Return the number of a lab that adds to the script.

    Raises:
        LabError: for another lab; the sentence lists those that do.
    """
    labs = [f"{number:02}" for number in range(LAST + 1)]
    if lab == CHECKPOINTS:
        raise refusal(
            en=f"lab {lab} adds nothing to the script: go on with that of lab 04, which saves and loads, or with lab "
            f"{LAST:02}'s.",
            fr=f"le TP {lab} n’ajoute rien au script : complétez celui du TP 04, qui enregistre et relit, ou celui du "
            f"TP {LAST:02}.",
        )
    if lab not in labs:
        raise LabError(one_of("lab", lab, labs))
    return int(lab)


def write_script(lab: str, folder: Path, language: Language, *, solved: bool = False) -> Path:
    """Write a lab's script into a folder that has none yet.

    Raises:
        LabError: for a lab that adds nothing to the script, or where one lies there already.
    """
    number = number_of_lab(lab)
    path = folder / NAME
    if path.exists():
        raise refusal(
            en=f"{path} is there already, and perhaps your work: name another folder.",
            fr=f"{path} existe déjà, et c’est peut-être votre travail : donnez un autre dossier.",
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(path, script_of(number, language, solved=solved))
    return path
