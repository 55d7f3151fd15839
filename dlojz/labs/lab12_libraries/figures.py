"""Figures and tables of lab 12: programs of the libraries with new lines marked, their runs, and the course's command.

A library that is not installed is named in one sentence, with the command that installs it. The command runs as a list
of words, in a temporary folder and with a limit of time.
"""

import difflib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from dlojz.base.language import decimal, format_bytes, say, significant, yes_no
from dlojz.base.machine import patience
from dlojz.base.table import Table, safe, titles
from dlojz.config.run_config import RunConfig
from dlojz.display.canvas import LabFigure, finish, new_figure, plain
from dlojz.display.figures.library_figures import DASH, all_lines_words, difference_words
from dlojz.display.style import BLACK, BLUE, LINE_STYLES, ORANGE_TINT, REMARK, SMALL, VERMILION, WHITE
from dlojz.labs.kit.exercise import Sentences, Verdict, or_to_do, show
from dlojz.labs.kit.figures import measured_footprint, memory_and_messages, pictured
from dlojz.labs.lab12_libraries.exercises_configuration import COURSE, messages_of
from dlojz.labs.lab12_libraries.exercises_loops import loops as loops  # noqa: PLC0414
from dlojz.labs.lab12_libraries.exercises_loops import updates_made as updates_made  # noqa: PLC0414
from dlojz.libraries.library_catalogue import LIBRARIES, REFERENCE, absence, code_lines, library
from dlojz.libraries.side_by_side import leaves, rows, sent, status_words
from dlojz.results.footprint import Traffic
from dlojz.results.record import RunRecord
from dlojz.running.run import Run

TEXTS = Sentences(Path(__file__).with_suffix(".md"))

_NEW = f"background: {ORANGE_TINT}"
_BLOCK = f"line-height: 1.3; max-height: 32em; overflow: auto; color: {BLACK}; background: {WHITE}"


@dataclass(frozen=True)
class Listing:
    """Program, line by line.

    Args:
        new: numbers, from 0, of the lines of code that the program it is compared with does not have.
    """

    name: str
    lines: tuple[str, ...]
    new: frozenset[int]

    def __str__(self) -> str:
        marked = ((f"{self._mark(number)} {line}").rstrip() for number, line in enumerate(self.lines))
        return "\n".join((self._heading(), *marked))

    __repr__ = __str__

    def _mark(self, number: int) -> str:
        return "+" if number in self.new else " "

    def _heading(self) -> str:
        if not self.new:
            return self.name
        return TEXTS.say("listing", "caption", name=self.name, count=len(self.new))

    def _repr_html_(self) -> str:
        rows = [
            f'<span style="{_NEW}">+ {line}</span>' if number in self.new else f"  {line}"
            for number, line in enumerate(_coloured(self.lines))
        ]
        return f'<b>{safe(self._heading())}</b><pre style="{_BLOCK}">' + "\n".join(rows) + "</pre>"


def _coloured(lines: Sequence[str]) -> list[str]:
    """Colour keywords, strings and comments of Python lines as HTML."""
    from pygments import lex
    from pygments.lexers import PythonLexer
    from pygments.token import Comment, Keyword, Operator, String

    looks = {Keyword: BLUE, Operator.Word: BLUE, String: VERMILION, Comment: REMARK}
    html_lines = [""]
    for kind, text in lex("\n".join(lines), PythonLexer(stripnl=False, ensurenl=False)):
        # Kinds of pygments form a tree: `kind in family` holds for every kind below.
        colour = next((colour for family, colour in looks.items() if kind in family), None)
        # A docstring is one token of several lines; a span may not reach over two of them.
        for number, piece in enumerate(text.split("\n")):
            if number:
                html_lines.append("")
            html_lines[-1] += (
                f'<span style="color: {safe(colour)}">{safe(piece)}</span>' if piece and colour else safe(piece)
            )
    return html_lines


def new_lines(text: str, reference: str) -> frozenset[int]:
    """Number, from 0, the lines of code of a program that another does not have, as `diff` matches them."""
    program_code, reference_code = code_lines(text), code_lines(reference)
    # autojunk would pass over lines that occur often, from 200 lines on.
    matcher = difflib.SequenceMatcher(None, reference_code, program_code, autojunk=False)
    common_lines = {index for block in matcher.get_matching_blocks() for index in range(block.b, block.b + block.size)}
    new, number, lines = set(), 0, text.splitlines()
    for index, line in enumerate(program_code):
        # A line of code is a line of the file without its remark: the next one that begins with it.
        while not lines[number].strip().startswith(line):
            number += 1
        if index not in common_lines:
            new.add(number)
        number += 1
    return frozenset(new)


def program(name: str) -> Listing:
    """Show the program of a library, with the lines marked that plain torch's does not have.

    Raises:
        LabError: if there is no such library.
    """
    path = library(name).program
    text = path.read_text(encoding="utf-8")
    plain = LIBRARIES[REFERENCE].program.read_text(encoding="utf-8")
    return Listing(path.name, tuple(text.splitlines()), new_lines(text, plain))


SAME_LOSS = 1e-5
"""Losses closer than this are those of the same training, rounded otherwise."""
HAIRLINE_BYTES = 2**14
"""Less than this is thinner than a line, on an axis of MiB."""


def catalogue() -> Table:
    """Tabulate the libraries: what is installed here, and what each hides."""
    table_rows = []
    for name, entry in LIBRARIES.items():
        availability = (entry.version if entry.installed else entry.command) or yes_no(entry.installed)
        table_rows.append((entry.title, availability, all_lines_words(name), entry.runs(), entry.hides()))
    head = titles(*TEXTS.sentence("catalogue", "heads"))
    return Table(head, tuple(table_rows))


def train(config: RunConfig, library: str, **changes: Any) -> Run | None:
    """Train by a library's program; where it is not installed, show a note and return None."""
    import dlojz

    missing = absence(library)
    if missing is not None:
        show(Verdict("note", missing + say(en=" It was not run here.", fr=" Il n’a pas été exécuté ici.")))
        return None
    run = dlojz.run(config, library=library, **changes)
    if not _completed(run):
        show(
            Verdict(
                "wrong",
                f"{title(run)}{say(en=':', fr=' :')} {status_words(run.state)}. "
                f"{run.record.reason if run.record else ''}",
            )
        )
    return run


def train_each(config: RunConfig, library: str, *changes: Mapping[str, Any]) -> list[Run | None]:
    """Train several layouts by a library's program; a missing library is reported once."""
    if absence(library) is None:
        return [train(config, library, **change) for change in changes]
    return [train(config, library), *[None] * (len(changes) - 1)]


def _completed(run: Run) -> bool:
    return run.record is not None and run.record.status == "completed"


def title(run: Run) -> str:
    """Name a run by library and layout, without the names of the lab's own engines."""
    library = LIBRARIES.get(run.config.library)
    layout = run.config.layout.title.removesuffix(" (torch)")
    return f"{library.title} ({layout.removeprefix(library.title).strip()})" if library else f"dlojz ({layout})"


def _there(runs: Sequence[Run | None]) -> list[Run]:
    return [run for run in runs if run is not None and _completed(run)]


@pictured
def side_by_side(*runs: Run | None) -> LabFigure:
    """Draw rank 0 of the completed runs: memory by category, and bytes sent; predicted in pale above."""
    completed_runs = _there(runs)
    opening = say(
        en="Memory by category at the moment of the peak, and bytes sent by collective, predicted and measured, of: ",
        fr="Mémoire par catégorie au moment du pic, et octets envoyés par communication, prédits et mesurés, pour : ",
    )
    titles = [title(run) for run in completed_runs]
    return memory_and_messages(completed_runs, titles, opening=opening, is_drawn=_can_be_seen, ncols=4, at_peak=True)


def _can_be_seen(traffic: Traffic) -> bool:
    """Whether a rank sends this for the library, and enough of it for a bar: else a legend would name none."""
    return leaves(traffic) and traffic.sent_bytes >= HAIRLINE_BYTES


@pictured
def losses(*runs: Run | None) -> LabFigure:
    """Draw the losses of the completed runs, and below how far each is from the first."""
    completed_runs = _there(runs)
    reference_losses = completed_runs[0].losses
    figure = new_figure(7.5, 4.6, alt=say(en="Loss by step, and gaps to the first: ",
        fr="Perte par pas, et écarts à la première : ") + ", ".join(map(title, completed_runs)))  # fmt: skip
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for index, (run, (color, line, marker)) in enumerate(zip(completed_runs, LINE_STYLES, strict=False)):
        # Hollow, and smaller from run to run: equal losses lie on each other, and all are to be seen.
        style = {"color": color, "linestyle": line, "marker": marker, "markersize": 12 - 1.5 * index,
                "markerfacecolor": "none"}  # fmt: skip
        above.plot(run.losses, label=title(run), **style)
        if index:
            below.plot([abs(a - b) for a, b in zip(run.losses, reference_losses, strict=True)], **style)
    below.axhline(SAME_LOSS, color="black", linestyle=":", linewidth=1)
    # symlog has a place for a gap of exactly 0.
    below.set_yscale("symlog", linthresh=1e-7)
    below.set_ylim(-2e-8, 1e-4)
    below.set_yticks([0, 1e-7, 1e-6, 1e-5, 1e-4], ["0", "10⁻⁷", "10⁻⁶", "10⁻⁵", "10⁻⁴"])
    below.set_xticks(range(len(reference_losses)), [str(step) for step in range(1, len(reference_losses) + 1)])
    below.set_xlabel(say(en="step", fr="pas"))
    above.set_ylabel(say(en="loss", fr="perte"))
    below.set_ylabel(say(en="gap to PyTorch", fr="écart à PyTorch"))
    above.legend(frameon=False, fontsize=SMALL)
    for axes in (above, below):
        plain(axes)
    return finish(figure)


def gap(run: Run, reference: Run) -> float:
    """Return the largest difference between two runs' losses."""
    return max(abs(a - b) for a, b in zip(run.losses, reference.losses, strict=True))


def table(*runs: Run | None) -> Table:
    """Tabulate the runs, and the libraries that have none, with the reason.

    The time of a step is that of this machine, over plain torch's: it says what a library costs besides, not which is
    faster on GPUs.
    """
    completed_runs = _there(runs)
    reference_record = next(run.record for run in completed_runs if run.config.library == REFERENCE)
    run_rows = []
    for run in completed_runs:
        name = run.config.library
        (row,) = rows({REFERENCE: _records(reference_record), name: _records(run.record)}, names=[name])
        run_rows.append(
            (
                title(run),
                all_lines_words(name),
                difference_words(row),
                _pair(row.states_bytes),
                _pair(row.peak_bytes),
                _pair(row.sent_bytes),
                DASH if row.step_ratio is None else f"×{decimal(row.step_ratio, 2)}",
            )
        )
    silent = [name for name in LIBRARIES if name not in {run.config.library for run in completed_runs}]
    not_run = [(LIBRARIES[name].title, all_lines_words(name), absence(name) or DASH, *[DASH] * 4) for name in silent]
    head = titles(*TEXTS.sentence("table", "heads"))
    return Table(head, (*run_rows, *not_run))


def _records(record: RunRecord | None) -> list[RunRecord]:
    return [] if record is None else [record]


def two_choices(run: Run, variant: Run) -> Table:
    """Compare the states that two runs of one training hold and what they send, measured on rank 0.

    The first is the reference. No peak: on a busy machine a thread of gloo may add the message that it still holds.
    """
    same_losses = say(en="yes", fr="oui") if gap(variant, run) < SAME_LOSS else say(en="no", fr="non")
    measured = []
    for choice, answer in ((run, DASH), (variant, same_losses)):
        footprint = measured_footprint(choice)
        memory = footprint.memory
        byte_counts = memory.optimizer_bytes, memory.states_bytes, sent(footprint)
        measured.append((title(choice), answer, *map(format_bytes, byte_counts)))
    head = titles(*TEXTS.sentence("two choices", "heads"))
    return Table(head, tuple(measured))


def _pair(pair: tuple[float | None, float | None]) -> str:
    return " | ".join(map(format_bytes, pair))


@or_to_do
def told(stage: Callable[[Mapping[str, int], int], int], *runs: Run | None) -> Table | Verdict:
    """Tabulate each run's messages of one step, in units of the weights, and what the student's function reads."""
    from dlojz import models

    meanings = {
        0: say(en="everything is whole everywhere", fr="tout est entier partout"),
        2: say(en="the optimizer is sharded", fr="l’optimiseur est réparti"),
        3: say(en="the weights are sharded too", fr="les poids aussi sont répartis"),
    }
    if not _there(runs):
        return Verdict("note", TEXTS.say("told", "None of these runs took place"))  # fmt: skip
    names = ("all_reduce", "all_gather", "reduce_scatter")
    read_off = []
    for run in _there(runs):
        weight_bytes = 4 * models.describe(run.config.model).parameters
        messages = messages_of(measured_footprint(run))
        stage_number = stage(dict(messages), weight_bytes)
        read_off.append(
            (
                title(run),
                *(f"{significant(round(messages.get(name, 0) / weight_bytes, 2), 4)} Ψ" for name in names),
                meanings.get(stage_number, str(stage_number)),
            )
        )
    head = (say(en="program", fr="programme"), *(name.replace("_", "-") for name in names),
            say(en="your function", fr="votre fonction"))  # fmt: skip
    return Table(head, tuple(read_off))


FILE = "ds_config_zero2.json"
WALL_S = 120.0
LINES = 12


@dataclass(frozen=True)
class Ran:
    """Command, the file that it read, and what it printed on the first rank."""

    command: str
    document: str
    printed: str

    def __str__(self) -> str:
        return f"{FILE}:\n{self.document}\n\n$ {self.command}\n{self.printed}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        document = "\n".join(safe(line) for line in self.document.split("\n"))
        printed = "\n".join(safe(line) for line in self.printed.split("\n"))
        return f"<b>{safe(FILE)}</b><pre>{document}</pre><pre>$ {safe(self.command)}\n{printed}</pre>"


@or_to_do
def course_command(
    complete: Callable[..., Mapping[str, Any]], *, global_batch: int = 16, fits: int = 4, steps: int = 3
) -> Ran:
    """Run DeepSpeed's program on two processes with the course's options and the student's JSON.

    Args:
        global_batch: samples of a step.
        fits: samples of a micro-batch, at most.
    """
    document = dict(complete(COURSE, global_batch, 2, fits))
    text = json.dumps(document, indent=4)
    # As DeepSpeed: of the three sizes two are enough; with fewer it says so itself.
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    batch, micro, accumulation = (int(document.get(key, 0)) for key in keys)
    micro = micro or max(batch // (2 * (accumulation or 1)), 1)
    accumulation = accumulation or max(batch // (2 * micro), 1)
    program = LIBRARIES["deepspeed"].program
    words = [
        *("--nproc-per-node", "2", str(program), "-b", str(micro), "-s", str(steps), "--accumulation"),
        *(str(accumulation), "--model", "gpt_tiny", "--deepspeed", "--deepspeed_config", FILE),
    ]
    command_text = " ".join(["torchrun", *(program.name if word == str(program) else word for word in words)])
    with tempfile.TemporaryDirectory(prefix="course-") as folder:
        Path(folder, FILE).write_text(text, encoding="utf-8")
        return Ran(command_text, text, _printed([sys.executable, "-m", "torch.distributed.run", *words], folder))


def _printed(command: list[str], folder: str) -> str:
    # One thread for each of the two processes, which share the cores.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        process = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=WALL_S * patience(),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return TEXTS.say("command", "stopped", timeout=error.timeout)
    loss_lines = [line for line in process.stdout.splitlines() if line.startswith("loss")]
    if process.returncode == 0 and loss_lines:
        return "\n".join(loss_lines)
    return _refused(process.stderr.splitlines())


_ERROR = re.compile(r"(\[rank\d+\]: )?[\w.]+(?:Error|Exception)\b")


def _refused(lines: Sequence[str]) -> str:
    """What the first process that ended says of why, without the account of torchrun that follows."""
    process_lines = list(takewhile(lambda line: "torch/distributed/elastic" not in line, lines))
    number, error_match = next(
        ((number, match) for number, line in enumerate(process_lines) if (match := _ERROR.match(line))), (0, None)
    )
    if error_match is None:  # the program has refused something in its own words
        return "\n".join([line for line in process_lines if line.strip()][-1:] or lines[-LINES:])
    rank = error_match[1] or ""
    following_lines = takewhile(
        lambda line: not _ERROR.match(line) and "Traceback" not in line, process_lines[number + 1 :]
    )
    message_lines = [process_lines[number], *(line for line in following_lines if line.startswith(rank))]
    return "\n".join(line.removeprefix(rank) for line in message_lines[:LINES])
