"""Commands `dlojz doctor` and `dlojz trace`: what is wrong, and why.

`dlojz doctor` checks the installation, and explains a run that ran out of memory. A check never raises: what goes wrong
in it is its answer, with what to do. Nothing is changed on the machine. `dlojz trace` reads the profiler's traces of
any training, and says who waits for whom, what one rank does, or what got slower; of memory snapshots, what fills them.
A picture is written before anything is printed.
"""

from __future__ import annotations

import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rich.text import Text

from dlojz.base.language import format_bytes, format_seconds, language, say
from dlojz.base.machine import (
    cores_available,
    extensions_folder,
    machine_limit,
    meet_on_loopback,
    memory_free_bytes,
    remedy_of_locks,
    stale_locks,
    words_of_limit,
)
from dlojz.base.requirements import requirements_of
from dlojz.base.table import Lines, Table, titles, visible
from dlojz.cli import main
from dlojz.cli.options import WORDS, Answer, Given, check_writable, fields_of, phrase, progress_bar, tell_written, verb
from dlojz.display.style import GREEN, ORANGE, VERMILION

if TYPE_CHECKING:
    from dlojz.pipeline.traced_pipeline import TracedPipeline
    from dlojz.results.memory_snapshot import MemorySnapshot
    from dlojz.results.profiler_trace import TraceFile
    from dlojz.results.rank_activities import AlignedRanks, RankShares, Straggler
    from dlojz.results.rank_profile import Change, RankProfile
    from dlojz.running.failures.out_of_memory import PostMortem

State = Literal["ok", "warning", "problem"]
File = TypeVar("File")
Content = TypeVar("Content")
FREE_BYTES_WANTED, MEMORY_BYTES_WANTED, GLOO_LIMIT_S = 2**30, 3 * 2**30, 120

GLOO_RANK = """
import sys, torch, torch.distributed as dist
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
mean = torch.empty(1)
dist.reduce_scatter_tensor(mean, torch.tensor([1.0, 1.0]), op=dist.ReduceOp.AVG)
dist.destroy_process_group()
sys.exit(3 if total.item() != 3.0 else 4 if mean.item() != 1.0 else 0)
"""
ADDED = 4
"""Exit code of a rank whose gloo adds where it is asked for a mean: torch 2.8, among others (pytorch, issue 162338)."""


@dataclass(frozen=True)
class Check:
    """Result of one check: its state, what was found, and advice (empty where nothing is to be done)."""

    name: str
    state: State
    found: str
    advice: str = ""


def _warned(name: str, finding: str, warning: str = "") -> Check:
    return Check(name, "warning" if warning else "ok", finding, warning)


def examine(root: Path) -> list[Check]:
    """Run all checks; `root` is the folder of the runs."""
    device = say(en="no CUDA device: runs use the CPU", fr="pas de GPU CUDA : les exécutions utilisent le CPU")
    queue = say(en="no sbatch here: runs stay on this machine", fr="pas de sbatch ici : les exécutions restent ici")
    spoken = say(en=f"{language()} (DLOJZ_LANG=fr for French)", fr=f"{language()} (DLOJZ_LANG=en pour l’anglais)")
    # All run in this order, each under `_safely`; a lambda, so that torch is imported within its check.
    checks: dict[str, Callable[[], Check]] = {
        "python": lambda: _warned("python", f"{platform.python_version()}, {sys.executable}"),
        "torch": lambda: _torch(device),
        **{f"[{group}]" if group else "core": partial(_libraries, group) for group in uses_of_groups()},
        **{name: partial(_imported, name) for name in ("torchvision", "deepspeed") if find_spec(name)},
        "cores": _cores,
        "memory": _memory,
        "disk": partial(check_disk, root),
        "extensions": _extensions,
        "gloo": _gloo,
        "slurm": lambda: _warned("slurm", shutil.which("sbatch") or queue),
        "language": lambda: _warned("language", spoken),
    }
    return [_safely(name, check) for name, check in checks.items()]


def _safely(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:
        return Check(name, "problem", f"{type(error).__name__}: {error}")


def _torch(without_gpu: str) -> Check:
    """Check that torch sees the GPUs of this machine, and was built for them."""
    import torch

    devices = range(torch.cuda.device_count())
    names = [torch.cuda.get_device_name(index) for index in devices]
    finding = f"{version('torch')}, {', '.join(names) or without_gpu}"
    built = torch.cuda.get_arch_list()
    for index in devices:
        capability = torch.cuda.get_device_capability(index)
        if not has_kernels(built, capability):
            sm = "sm_{}{}".format(*capability)
            advice = phrase(
                "no kernels for a GPU", cuda=torch.version.cuda, architectures=", ".join(built), sm=sm, gpu=names[index]
            )
            return Check("torch", "problem", finding, advice)
    if not names and shutil.which("nvidia-smi"):
        advice = phrase("torch sees no GPU")
        return _warned("torch", finding, advice)
    return _warned("torch", finding)


def has_kernels(built: Sequence[str], capability: tuple[int, int]) -> bool:
    """Return whether a torch built for these architectures (`sm_80`, `compute_90`) runs on a GPU of this capability.

    Machine code runs on later minor versions of its major one, PTX (`compute_`) is compiled for every later GPU.

    Source: NVIDIA, CUDA C++ Programming Guide, "Binary compatibility" and "PTX compatibility".
    """
    for name in built:
        kind, _, digits = name.partition("_")
        number = re.match(r"\d+", digits)
        if number is None:
            continue
        # sm_90 is 9.0 and sm_120 is 12.0: the last digit is the minor version; a letter after it was cut off above.
        major, minor = int(number[0][:-1]), int(number[0][-1])
        later = (major, minor) <= capability
        if later and (kind == "compute" or major == capability[0]):
            return True
    return False


def uses_of_groups() -> dict[str, str]:
    """List what each group of libraries is for, by its name in pyproject.toml; the core has none."""
    return {
        "": say(en="every command", fr="toutes les commandes"),
        "labs": say(en="the notebooks", fr="les notebooks"),
        "deepspeed": phrase("use of DeepSpeed"),
        "compress": say(en="models of timm and torchvision", fr="les modèles de timm et torchvision"),
        "transformers": say(en="models hf:FOLDER", fr="les modèles hf:DOSSIER"),
        "libraries": say(en="two libraries of lab 12", fr="deux bibliothèques du TP 12"),
    }


OPTIONAL = ("transformers", "libraries")
"""Groups that no lab needs to be done."""


def _libraries(group: str) -> Check:
    """Check that the libraries of one group are there, in the versions that pyproject.toml asks for."""
    name = f"[{group}]" if group else "core"
    # The requirements come from the metadata of the installed package, which a bare checkout does not have.
    try:
        requirements = requirements_of(group)
    except PackageNotFoundError:
        finding = say(en="dlojz is on the path, but not installed", fr="dlojz est dans le chemin, mais pas installé")
        advice = say(en="what it needs is not known here: ", fr="ses besoins ne sont pas connus ici : ")
        return _warned(name, finding, advice + "pip install --no-deps -e .")
    missing = {requirement: sentence for requirement in requirements if (sentence := _missing(*requirement))}
    if not missing:
        names = ", ".join(distribution for distribution, _ in requirements)
        return Check(name, "ok", names)
    state: State = "problem" if not group else "warning"
    finding = ", ".join(missing.values())
    install = f"pip install {' '.join(shlex.quote(distribution + bounds) for distribution, bounds in missing)}"
    use = uses_of_groups()[group]
    if group in OPTIONAL:
        finding = phrase("optional libraries", use=use, finding=finding, install=install)
        return Check(name, "ok", finding)
    advice = say(en=f"needed for {use}: {install}", fr=f"nécessaire pour {use} : {install}")
    return Check(name, state, finding, advice)


def _missing(distribution: str, bounds: str) -> str:
    """Say that a library is missing or has another version; empty where it is right."""
    try:
        installed_version = version(distribution)
    except PackageNotFoundError:
        return say(en=f"{distribution} is missing", fr=f"{distribution} manque")
    for sign, bound in re.findall(r"(>=|==)([\d.]+)", bounds):
        # Of a bound's signs `>=` and `==` are read; a newer version is wrong for `==` alone.
        is_less, is_more = _numbers(installed_version) < _numbers(bound), _numbers(installed_version) > _numbers(bound)
        if is_less or (sign == "==" and is_more):
            return f"{distribution} {installed_version} ({sign}{bound})"
    return ""


def _numbers(text: str) -> list[int]:
    """Numbers of a version, for a comparison; what follows them (`+cpu`, `rc1`) does not count."""
    release = re.match(r"[\d.]*\d", text)
    numbers = [int(number) for number in release[0].split(".")] if release else []
    # 2.1.0 and 2.1 are one version.
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers


IMPORT_LIMIT_S = 120


def _imported(name: str) -> Check:
    """Check that a library that is installed can be imported too, in a clean process as a script of one's own has."""
    code = f"import {name}; print({name}.__version__)"
    try:
        process = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            # Without it DeepSpeed looks for an accelerator while it is imported; a choice of the user's stands.
            env={"DS_ACCELERATOR": "cpu"} | dict(os.environ),
            timeout=IMPORT_LIMIT_S,
            capture_output=True,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Check(name, "problem", say(en=f"no answer in {IMPORT_LIMIT_S} s", fr=f"muet pendant {IMPORT_LIMIT_S} s"))
    if not process.returncode:
        return Check(name, "ok", process.stdout.split()[-1])
    reason = next(iter(process.stderr.strip().splitlines()[::-1]), "")[:200]
    finding = say(en=f"{version(name)} does not import: {reason}", fr=f"{version(name)} ne s’importe pas : {reason}")
    # Its extension has not loaded: torch has none of its operators, or the linker none of torch's symbols.
    if name != "torchvision" or not re.search(r"operator torchvision::|undefined symbol", reason):
        return Check(name, "problem", finding)
    # The local part of torch's version (2.8.0+cpu) names the index that a matching torchvision comes from.
    (numbers, _, build), own_numbers = version("torch").partition("+"), version(name).partition("+")[0]
    index = f" --index-url https://download.pytorch.org/whl/{build}" if build else ""
    pair = f"pip install --no-deps --force-reinstall torch=={numbers} torchvision=={own_numbers}{index}"
    advice = phrase("torchvision of another torch", pair=pair)
    return _warned(name, finding, advice)


def _cores() -> Check:
    cores = cores_available()
    slow = phrase("one core")
    return _warned("cores", str(cores), slow if cores < 2 else "")


def _memory() -> Check:
    free, limit = memory_free_bytes(), machine_limit()
    free_text, needed_text = format_bytes(free), format_bytes(MEMORY_BYTES_WANTED)
    limit_text = phrase("limit of memory", limit=limit, limit_words=words_of_limit(limit.code))
    if free < MEMORY_BYTES_WANTED:
        advice = phrase("little memory", needed_text=needed_text)
        return _warned("memory", f"{free_text} {limit_text}", advice)
    return _warned("memory", say(en=f"{free_text} free {limit_text}", fr=f"{free_text} libres {limit_text}"))


def check_disk(root: Path) -> Check:
    """Check that the folder of the runs can be written and has space."""
    nearest_folder = next(folder for folder in (root, *root.parents) if folder.exists())
    if reason := _not_writable(root):
        advice = phrase("folder cannot be written")
        return Check("disk", "problem", f"{root}: {reason}", advice)
    free_bytes = shutil.disk_usage(nearest_folder).free
    free = format_bytes(free_bytes)
    finding = say(en=f"{root}: writable, {free} free", fr=f"{root} : inscriptible, {free} libres")
    full = phrase("disk nearly full")
    return _warned("disk", finding, full if free_bytes < FREE_BYTES_WANTED else "")


def _extensions() -> Check:
    """Check that no lock was left in torch's cache of compiled extensions, and that it can be written."""
    locks = stale_locks()
    if locks:
        return Check("extensions", "problem", ", ".join(map(str, locks)), remedy_of_locks(locks))
    folder = extensions_folder()
    if reason := _not_writable(folder):
        advice = phrase("extensions cannot be kept")
        return _warned("extensions", f"{folder}: {reason}", advice)
    return _warned("extensions", say(en="no stale lock", fr="pas de verrou abandonné"))


def _not_writable(folder: Path) -> str:
    """Return why nothing can be made in a folder, or where it would be made; empty where it can."""
    try:
        with tempfile.NamedTemporaryFile(
            dir=next(candidate for candidate in (folder, *folder.parents) if candidate.exists())
        ):
            return ""
    except OSError as error:
        return error.strerror or type(error).__name__


def _gloo() -> Check:
    """Check an all-reduce of two real processes."""
    started_s, environment = time.monotonic(), {**os.environ}
    # The two ranks meet in a file, and then talk over loopback: no port has to be free beforehand.
    meet_on_loopback(environment)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", GLOO_RANK, str(rank), str(Path(folder) / "store")],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            complaints = [rank.communicate(timeout=GLOO_LIMIT_S)[1] for rank in ranks]
        except subprocess.TimeoutExpired:
            complaints = [say(en="no answer", fr="pas de réponse")]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    codes = {rank.returncode for rank in ranks}
    # Exit codes of GLOO_RANK: both 0; both ADDED, where only the mean is wrong; anything else is a problem.
    if codes in ({0}, {ADDED}):
        took = format_seconds(time.monotonic() - started_s)
        finding = say(en=f"2 processes all-reduced in {took}", fr=f"2 processus ont fait un all-reduce en {took}")
        sum_advice = phrase("gloo adds")
        return _warned("gloo", finding, sum_advice if codes == {ADDED} else "")
    # The last line on stderr, which names the error of a traceback.
    last_line = next((lines[-1] for text in complaints if (lines := text.strip().splitlines())), "")
    advice = phrase("gloo fails")
    return Check("gloo", "problem", last_line[:200], advice)


MARKS: dict[State, tuple[str, str]] = {"ok": ("✓", GREEN), "warning": ("!", ORANGE), "problem": ("✗", VERMILION)}


@verb("doctor")
def doctor_command(args: Given, answer: Answer) -> int:
    """Check the machine, explain a run that failed, or read anybody's log."""
    from dlojz.running.store import runs_root

    if args[WORDS]:
        explain = _read_log if _is_log(args[WORDS][0], args["root"]) else _explain
        explain(args, answer)
        return main.DONE
    checks = examine(runs_root(args["root"]))
    problems = sum(check.state == "problem" for check in checks)
    if args["json"]:
        answer({"checks": [asdict(check) for check in checks], "problems": problems})
    else:
        answer(_table(checks))
        answer(_verdict(checks))
    return main.FAILED if problems else main.DONE


def _is_log(word: str, root: str | None) -> bool:
    """Return whether a word is standard input or a path, and no run's name."""
    from dlojz.running.store import runs_root

    return word == "-" or (Path(word).exists() and not (os.sep not in word and (runs_root(root) / word).exists()))


def _read_log(args: Given, answer: Answer) -> None:
    """Print the cause that a log tells, what followed, and what to do."""
    from dlojz.running.failures.log_diagnosis import log_answer

    with progress_bar(say(en="MB read", fr="Mo lus")) as update:
        documents, lines = log_answer(args[WORDS][0], lambda num_characters: update(num_characters // 10**6))
    for part in [{"logs": documents}] if args["json"] else map(Text, lines):
        answer(part)


def _explain(args: Given, answer: Answer) -> None:
    """Explain why one run went wrong, or what filled its memory."""
    from dlojz.running.run import find

    run = find(args[WORDS][0], args["root"])
    if run.state not in ("completed", "running", "queued", "oom"):
        answer(run.diagnosis().to_dict() if args["json"] else repr(run.diagnosis()))
        return
    from dlojz.running.failures.out_of_memory import post_mortem

    diagnosis = post_mortem(run)
    if args["json"]:
        answer(diagnosis.to_dict())
    else:
        for line in told(diagnosis):
            answer(line)


def _verdict(checks: list[Check]) -> str:
    problems, warnings = (sum(check.state == state for check in checks) for state in ("problem", "warning"))
    if problems:
        return phrase("problems", problems=problems)
    if warnings:
        return say(en=f"Ready, with {warnings} warning(s).", fr=f"Prêt, avec {warnings} avertissement(s).")
    return say(en="Ready: start with `dlojz demo`.", fr="Prêt : commencez par `dlojz demo`.")


def _table(checks: list[Check]) -> Table:
    words = dict(zip(MARKS, titles(en="ok; warning; problem", fr="ok; attention; problème"), strict=True))
    rows = (
        (
            f"{MARKS[check.state][0]} {words[check.state]}",
            check.name,
            Lines("\n→ ".join(map(visible, filter(None, (check.found, check.advice))))),
        )
        for check in checks
    )
    colors = tuple(MARKS[check.state][1] for check in checks)
    return Table(("", "", ""), tuple(rows), align="l", whole=2, colors=colors)


def told(diagnosis: PostMortem) -> list[Any]:
    """Write the diagnosis as texts to print, one after the other."""
    from dlojz.display.tables import status_label
    from dlojz.running.failures.out_of_memory import in_one_line, memory_lines, module_lines

    record = diagnosis.record
    run, reason = f"{record.run_id} ({visible(record.title)})", visible(record.reason)
    if not diagnosis.out_of_memory:
        ended = status_label(record.status) + (f" ({reason})" if reason else "")
        otherwise = phrase("memory was enough", run=run, ended=ended)
        return [otherwise, in_one_line(diagnosis), *module_lines(diagnosis)]
    headline = say(en=f"{run} ran out of memory: {reason}", fr=f"{run} a épuisé la mémoire : {reason}")
    return [Text(headline, style="bold"), "", *memory_lines(diagnosis)]


@verb("trace")
def trace_command(args: Given, answer: Answer) -> None:
    """Say who waits for whom in the traces of a training, what one rank does, or what fills its memory."""
    from dlojz.pipeline.traced_pipeline import aligned_pipelines
    from dlojz.results.memory_snapshot import is_snapshot
    from dlojz.results.profiler_trace import trace_files
    from dlojz.results.rank_activities import activities_of, check_ranks, shares_of, stragglers_of

    check_writable(args, ["png"])
    against = [args["against"]] if "against" in args else []
    if any(map(is_snapshot, [*args[WORDS], *against])):
        _tell_snapshots([*args[WORDS]], against, args, answer)
        return
    files = trace_files(args[WORDS])
    if against or len(files) == 1:
        _tell_profiles(files, trace_files(against), args, answer)
        return
    activities = _each(say(en="traces read", fr="traces lues"), activities_of, files)
    check_ranks(activities, [file.name for file in files])
    activities.sort(key=lambda rank: rank.rank)
    together, pipelines = aligned_pipelines(activities)
    shares, stragglers = shares_of(together), stragglers_of(together)
    if args["png"]:
        _draw_traces(together, pipelines, args["png"])
        tell_written(args["png"])
    if args["json"]:
        answer(_trace_document(together, shares, stragglers, pipelines))
    else:
        _tell_traces(together, shares, stragglers, pipelines, answer)


def _each(label: str, read: Callable[[File], Content], files: Sequence[File]) -> list[Content]:
    """Read files under a progress bar, one at a time: of each only what it says is kept."""
    contents = []
    with progress_bar(label, total=len(files)) as update:
        for file in files:
            contents.append(read(file))
            update(len(contents))
    return contents


def _tell_profiles(files: list[TraceFile], later: list[TraceFile], args: Given, answer: Answer) -> None:
    """Say what one rank does, or what got slower from one trace to another."""
    from dlojz.display import trace_tables as words
    from dlojz.results.rank_profile import compared, profile_of

    if later and len(files) + len(later) > 2:
        raise phrase.refused("one trace against one", count=len(files), later_count=len(later))
    profiles = _each(say(en="traces read", fr="traces lues"), profile_of, [*files, *later])
    if not later:
        _tell_profile(profiles[0], args, answer)
        return
    comparison = compared(*profiles)
    if args["png"]:
        from dlojz.display.figures.run_figures import profiles_figure

        profiles_figure(comparison, args["png"])
        tell_written(args["png"])
    if args["json"]:
        rows = {name: [_change(row) for row in getattr(comparison, name)] for name in ("parts", "kinds", "kernels")}
        sides = {name: _profile_document(side) for name, side in zip(("before", "after"), profiles, strict=True)}
        answer({"per_step": comparison.per_step, "length": _change(comparison.length), **rows, **sides})
        return
    answer(words.comparison_sentence(comparison))
    if sentence := words.different_devices_sentence(comparison):
        answer(sentence)
    for sentence in words.change_sentences(comparison):
        answer(sentence)
    for name in ("parts", "kinds", "kernels"):
        answer("")
        answer(words.changes_table(comparison, name))


def _change(row: Change) -> dict[str, Any]:
    return {**row._asdict(), "difference_s": row.difference_s}


def _tell_profile(profile: RankProfile, args: Given, answer: Answer) -> None:
    """Print, draw or write what one rank does."""
    from dlojz.display import trace_tables as words
    from dlojz.display.trace_tables import collectives_table

    if args["png"]:
        _draw_traces(profile.together, (), args["png"])
        tell_written(args["png"])
    if args["json"]:
        answer(_profile_document(profile))
        return
    answer(words.profile_sentence(profile))
    for sentence in words.launching_sentences(profile):
        answer(sentence)
    tables = [words.parts_table(profile), words.kinds_table(profile), words.kernels_table(profile)]
    if profile.communication:
        title = say(en="Communication by kind", fr="Communication par type")
        tables.insert(1, replace(collectives_table(profile.communication), caption=title))
    for table in tables:
        answer("")
        answer(table)
    answer("")
    for sentence in words.unknown_sentences(profile):
        answer(sentence)


def _profile_document(profile: RankProfile) -> dict[str, Any]:
    """Write what one rank does as plain JSON data; what needs other ranks is null."""
    share = {f"{part}_s": seconds for part, seconds in profile.parts_s.items()}
    launching = profile.launching
    return {
        **fields_of(profile, "name", "rank", "world_size", "devices", "length_s", "step_mark", "steps_s", "outside"),
        "on_device": profile.log.on_device,
        "ranks": [{"rank": profile.rank, **share, "waited_s": None}],
        "communication": [collective._asdict() for collective in profile.communication],
        "kinds": [kind._asdict() for kind in profile.kinds],
        "kernels": [kernel._asdict() for kernel in profile.kernels],
        "launching": {**asdict(launching), "bound": launching.bound} if launching else None,
        "stragglers": None,
        "pipelines": None,
    }


def _tell_snapshots(paths: list[str], later: list[str], args: Given, answer: Answer) -> None:
    """Say what fills the memory at the peak of a snapshot, or what grew from one to another."""
    from dlojz.display import trace_tables as words
    from dlojz.results.memory_snapshot import grown, is_snapshot, snapshot_of

    if len(paths) > 1 or not all(map(is_snapshot, [*paths, *later])):
        raise phrase.refused("snapshots are read alone")
    snapshots = _each(say(en="snapshots read", fr="instantanés lus"), snapshot_of, [*paths, *later])
    growth = grown(*snapshots) if later else ()
    if args["png"]:
        from dlojz.display.figures.run_figures import snapshots_figure

        snapshots_figure(snapshots, growth, args["png"])
        tell_written(args["png"])
    if args["json"]:
        documents = [_snapshot_document(snapshot) for snapshot in snapshots]
        lines = [{**row._asdict(), "difference_bytes": row.difference_bytes} for row in growth]
        answer({"before": documents[0], "after": documents[1], "lines": lines} if later else documents[0])
        return
    if later:
        answer(words.growth_sentence(snapshots[0], snapshots[1], growth))
    for snapshot in snapshots:
        for sentence in words.snapshot_sentences(snapshot):
            answer(sentence)
        answer(words.fragmentation_sentence(snapshot))
    answer("")
    answer(words.growth_table(growth) if later else words.frames_table(snapshots[0]))
    answer("")
    answer(words.occupancy_table(snapshots))


def _snapshot_document(snapshot: MemorySnapshot) -> dict[str, Any]:
    """Write a snapshot as plain JSON data; bytes everywhere, null where it does not say."""
    known = snapshot.recorded
    return {
        **fields_of(snapshot, "name", "device", "other_devices"),
        "entries": len(snapshot.in_use_bytes) - 1,
        "peak_bytes": snapshot.peak_bytes if known else None,
        "peak_entry": snapshot.peak if known else None,
        "reserved_at_peak_bytes": int(snapshot.reserved_bytes[snapshot.peak]) if known else None,
        "at_peak": [row._asdict() for row in snapshot.at_peak] if known else None,
        "at_end": [row._asdict() for row in snapshot.at_end],
        "segments": asdict(snapshot.occupancy) if snapshot.occupancy else None,
        "out_of_memory": [{"asked_bytes": asked, "free_bytes": free} for asked, free in snapshot.out_of_memory],
    }


def _draw_traces(together: AlignedRanks, pipelines: tuple[TracedPipeline, ...], path: str) -> None:
    """Draw the slowest pipeline under its simulation, or what each rank does."""
    if pipelines:
        from dlojz.display.figures.partition_figures import overlay_figure

        slowest = max(pipelines, key=lambda pipeline: pipeline.overlay.measured.makespan)
        overlay_figure(slowest.overlay.simulated, slowest.overlay.measured, path)
        return
    from dlojz.display.figures.run_figures import spans_figure
    from dlojz.results.rank_activities import spans_of

    title = say(en="traces of torch.profiler", fr="traces de torch.profiler")
    alt = phrase("alt of traces", ranks=len(together.ranks))
    spans_figure(spans_of(together), title, alt, path, steps=False)


def _tell_traces(
    together: AlignedRanks,
    shares: tuple[RankShares, ...],
    stragglers: tuple[Straggler, ...],
    pipelines: tuple[TracedPipeline, ...],
    answer: Answer,
) -> None:
    """Print what was found: clocks, shares, stragglers, pipelines, causes."""
    from dlojz.display import trace_tables as words
    from dlojz.results.rank_activities import collectives_of

    answer(words.clock_sentence(together))
    if missing := words.missing_sentence(together):
        answer(missing)
    answer("")
    answer(words.shares_table(shares, together.length_s))
    if collectives := collectives_of(together):
        answer("")
        answer(words.collectives_table(collectives))
    for sentence in words.straggler_sentences(stragglers, len(shares), together.length_s):
        answer(sentence)
    for pipeline in pipelines:
        answer("\n" + words.schedule_sentence(pipeline.match, pipeline))
        for sentence in words.overlay_sentences(pipeline):
            answer(sentence)
        answer("")
        answer(words.bubble_table(pipeline))
        for sentence in words.cause_sentences(pipeline):
            answer(sentence)


def _trace_document(
    together: AlignedRanks,
    shares: tuple[RankShares, ...],
    stragglers: tuple[Straggler, ...],
    pipelines: tuple[TracedPipeline, ...],
) -> dict[str, Any]:
    """Write what was found as plain JSON data; seconds everywhere."""
    from dlojz.pipeline.traced_pipeline import head_of_line, message_waits, slow_stage
    from dlojz.results.rank_activities import collectives_of

    # In s: how far the clock of a rank was moved, and how well that is known.
    clocks = zip(together.ranks, together.shifts_s, together.uncertain_s, strict=True)
    return {
        "length_s": together.length_s,
        "clocks": [
            {"rank": rank.rank, "shift_s": shift, "uncertain_s": unsure if math.isfinite(unsure) else None}
            for rank, shift, unsure in clocks
        ],
        "ranks": [share._asdict() for share in shares],
        "communication": [collective._asdict() for collective in collectives_of(together)],
        "stragglers": [straggler._asdict() for straggler in stragglers],
        "pipelines": [
            {
                "ranks": list(pipeline.ranks),
                "steps": pipeline.steps,
                "step": pipeline.step,
                "schedules": list(pipeline.match.names),
                "closest": pipeline.match.closest,
                "closest_share": pipeline.match.share,
                "first_difference": list(pipeline.match.first_difference) if pipeline.match.first_difference else None,
                "measured_s": pipeline.overlay.measured.makespan,
                "simulated_s": pipeline.overlay.simulated.makespan,
                "bubble_fraction": pipeline.overlay.measured.bubble_fraction,
                "simulated_bubble_fraction": pipeline.overlay.simulated.bubble_fraction,
                "idle_s": list(pipeline.overlay.measured.idle),
                "slow_stage": slow_stage(pipeline)._asdict(),
                "waits": [wait._asdict() for wait in message_waits(pipeline)],
                "head_of_line": [blocked._asdict() for blocked in head_of_line(pipeline)],
            }
            for pipeline in pipelines
        ],
    }
