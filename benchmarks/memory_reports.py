"""Memory that users of other programs have published, beside what `dlojz memory` says of the same setting.

    python benchmarks/memory_reports.py --page docs/memory_reports.md    # all: ten minutes on 2 cores
    python benchmarks/memory_reports.py --page docs/memory_reports.md --chosen bert-4 simsiam    # these rows anew

The reports, their sources and the words of each command stand in `memory_reports.toml`. A figure is within `BOUND`, a
verdict is that of the report, or the reason for the difference stands beside it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import tyro
from rich.console import Console

from dlojz.base.table import Table

FILE: Final = Path(__file__).with_suffix(".toml")
BOUND: Final = 0.12
"""How far off a forecast may be where the setting can be said."""
GIBIBYTE: Final = 2**30
FIELDS: Final = {"allocated": "peak_bytes", "reserved": "reserved_bytes", "nvidia-smi": "device_bytes"}
"""Fields of the answer that hold what a report has read off; `needed` is what is compared with the device."""
PAGE = """# Memory that others have published, and the forecast

Written by `python benchmarks/memory_reports.py --page docs/memory_reports.md`, from `benchmarks/memory_reports.toml`:
the sources, the models and the words of every command of `dlojz memory`. The figures were published by users of other
programs, on their GPUs; nothing was fitted on them. *Shown*: what the report has read off, and the forecast is compared
with: bytes that torch had allocated or reserved, what is needed of the GPU, or what nvidia-smi shows; of a compiled
step the forecast is a range, which may be wide: to lie in it says less. GiB.
"""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Describe one published figure, or a verdict, and the words of the command that asks about it.

    Args:
        shown: what was read off: allocated, reserved, needed or nvidia-smi; compiled: allocated by a compiled step, of
            which the command says a range; of a verdict empty.
        gib: the figure; None of a verdict.
        verdict: `fits` or `out of memory`; empty of a figure.
        beside: what the setting lacks or assumes, or why it differs by more than `BOUND`.
        unsaid: why no command says the setting; then there is none.
    """

    id: str
    source: str
    setting: str
    command: str = ""
    shown: str = ""
    gib: float | None = None
    verdict: str = ""
    beside: str = ""
    unsaid: str = ""


@dataclass(frozen=True)
class Answer:
    """Answer of the command: what is to be compared, in GiB, and whether it fits; both None if the command refuses.

    Of a range `gib` is the upper end and `low_gib` the lower; of one figure both are that figure.
    """

    report: Report
    gib: float | None = None
    fits: bool | None = None
    refusal: str = ""
    low_gib: float | None = None

    @property
    def off(self) -> float | None:
        """Relative difference from the figure, 0 within a range, else to its nearer end; None where there is none."""
        figure = self.report.gib
        if not self.gib or not self.low_gib or not figure:
            return None
        return min(max(figure, self.low_gib), self.gib) / figure - 1

    @property
    def is_right(self) -> bool | None:
        """Whether the figure is within `BOUND`, or the verdict is the report's; None where there is no answer."""
        if self.fits is None:
            return None
        if self.report.verdict:
            return self.fits == (self.report.verdict == "fits")
        return abs(self.off or 0.0) <= BOUND

    def cells(self) -> tuple[str, ...]:
        """Write the row of the table."""
        report, gib = self.report, "" if self.report.gib is None else f"{self.report.gib:.1f}"
        published, verdict = (report.verdict, {True: "fits", False: "out of memory"}) if report.verdict else (gib, {})
        low = "" if self.low_gib == self.gib else f"{self.low_gib:.1f} to "
        answered = "—" if self.gib is None else f"{low}{self.gib:.1f}"
        if self.fits is not None and verdict:
            answered = f"{verdict[self.fits]} ({answered})"
        off = "" if self.off is None else f"{round(100 * self.off):+d} %".replace("-", "−")
        mark = {True: "yes", False: "NO", None: "—"}[self.is_right]
        beside = "; ".join(filter(None, (report.beside, report.unsaid, self.refusal)))
        return report.id, report.setting, report.shown, published, answered, off, mark, beside


def registry() -> dict[str, Any]:
    """Read the reports and the models that their commands name."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def reports() -> dict[str, Report]:
    """Return all reports by their names; `the same` source is that of the report before."""
    found: dict[str, Report] = {}
    source = ""
    for entry in registry()["reports"]:
        source = entry["source"] if entry["source"] != "the same" else source
        found[entry["id"]] = Report(**{**entry, "source": source})
    return found


def write_models(folder: Path) -> None:
    """Write the configurations and files that the commands name into a folder."""
    content = registry()
    for name, configuration in content["models"].items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(configuration), encoding="utf-8")
    for name, text in content["files"].items():
        (folder / name).write_text(text, encoding="utf-8")


def answer(report: Report, folder: Path) -> Answer:
    """Ask the command about one report, in a folder with the models."""
    if not report.command:
        return Answer(report)
    words = [sys.executable, "-m", "dlojz", "memory", *shlex.split(report.command), "--json"]
    run = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, env=_environment())
    if run.returncode:
        return Answer(report, refusal=run.stderr.strip().splitlines()[-1])
    return answer_of(report, json.loads(run.stdout))


def answer_of(report: Report, document: Mapping[str, Any]) -> Answer:
    """Read off a document of `dlojz memory --json` what a report has."""
    if report.shown == "compiled":
        low_bytes, high_bytes = document["compiled"]["low_bytes"], document["compiled"]["high_bytes"]
        return Answer(report, high_bytes / GIBIBYTE, document["compiled"]["fits"], low_gib=low_bytes / GIBIBYTE)
    field = FIELDS.get(report.shown)
    num_bytes = document["memory"][field] if field else document["taken_bytes"]
    return Answer(report, num_bytes / GIBIBYTE, document["fits"], low_gib=num_bytes / GIBIBYTE)


def _environment() -> dict[str, str]:
    return {**os.environ, "DLOJZ_LANG": "en", "TIMM_FUSED_ATTN": "0"}


def table(answers: Iterable[Answer]) -> Table:
    """Lay the answers over the reports."""
    head = ("report", "setting", "shown", "published", "forecast", "off", "right", "beside")
    return Table(head, tuple(entry.cells() for entry in answers), align="lllrrrll")


def rows_of(answers: Iterable[Answer]) -> dict[str, str]:
    """Write the rows of the page, by the names of the reports."""
    answers = list(answers)
    return dict(zip((entry.report.id for entry in answers), table(answers).markdown().splitlines()[2:], strict=True))


def page_of(rows: Mapping[str, str]) -> str:
    """Write the page: the rows in the order of the registry, a count of them, then sources and commands."""
    known = reports()
    head = table([]).markdown().rstrip()
    listed = (
        f"- {name}: {report.source}" + (f"\n  `dlojz memory {report.command}`" if report.command else "")
        for name, report in known.items()
    )
    body = "\n".join(rows[name] for name in known)
    return f"{PAGE}\n{head}\n{body}\n\n{summary(rows)}\n\n## Sources and commands\n\n" + "\n".join(listed) + "\n"


def summary(rows: Mapping[str, str]) -> str:
    """Count the figures within the bound and the verdicts that are right, from the rows of the page."""
    known = reports()
    marks = {name: re.split(r"(?<!\\)\|", row)[7].strip() for name, row in rows.items()}
    verdicts = [mark for name, mark in marks.items() if known[name].verdict and mark != "—"]
    ranges = {name: mark for name, mark in marks.items() if known[name].shown == "compiled"}
    within = sum(re.split(r"(?<!\\)\|", rows[name])[6].strip() == "+0 %" for name in ranges)
    figures = [mark for name, mark in marks.items() if not known[name].verdict and mark != "—" and name not in ranges]
    bound, beside = f"{100 * BOUND:.0f} %", list(ranges.values()).count("yes")
    return (
        f"{len(marks)} reports of {len({report.source for report in known.values()})} sources. "
        f"Figures: {figures.count('yes')} of {len(figures)} within {bound}. "
        f"Compiled steps: {within} of {len(ranges)} within the range, {beside} at most {bound} off. "
        f"Verdicts: {verdicts.count('yes')} of {len(verdicts)} right. "
        f"Without an answer, for the reason beside: {list(marks.values()).count('—')}."
    )


def main(chosen: tuple[str, ...] = (), page: Path | None = None) -> None:
    """Ask the command about each report, or about some, and print the table; on the page the other rows stay."""
    known = reports()
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder))
        answers = []
        for name in chosen or known:
            answers.append(answer(known[name], Path(folder)))
            print(*answers[-1].cells(), sep="  ", file=sys.stderr)
    Console(width=160).print(table(answers))
    if page is not None:
        lines = page.read_text(encoding="utf-8").splitlines() if chosen else []
        rows = {line.split("|")[1].strip(): line for line in lines if line.startswith("|")} | rows_of(answers)
        page.write_text(page_of({name: rows[name] for name in known}), encoding="utf-8")


if __name__ == "__main__":
    tyro.cli(main)
