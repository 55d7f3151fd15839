"""Training scripts that nobody changed: run with and without dlojz, and its record compared with an independent count.

    python benchmarks/strangers.py                      # all scripts: half an hour on 2 cores
    python benchmarks/strangers.py --only gan --only zero-3
    python benchmarks/strangers.py --list               # scripts and whose style they are in
    python benchmarks/strangers.py --json strangers.json

Each script of `benchmarks/strangers/` runs twice: as its user starts it (`python`, `torchrun`), counted by
`benchmarks/strangers_count.py`, which uses nothing of dlojz, and under `dlojz run`. A cell of the table is

    ✓    recorded, and equal to the count
    —    not recorded: dlojz says that it does not know
    ✗    WRONG: recorded, and other than the count; both values stand below the table
    ·    nothing to compare: the script has no such quantity, or the count does not know it

Measured: number of steps, losses, samples of a step (samples/s × median seconds of a step: no time is judged), samples
and tokens of each step, bytes of messages, weights, gradients, optimizer states, buffers, peak (within 5 %), FLOPs,
exit code, and whether the script prints the same. Predicted: states, peak, messages, FLOPs.

Exit status 1 if anything is wrong, 2 if a script has not run without dlojz either.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = Path(__file__).with_suffix("")
COUNT = Path(__file__).with_name("strangers_count.py")
sys.path.insert(0, str(ROOT))

from benchmarks.strangers_count import FOLDER, allocator_peaks  # noqa: E402 - benchmarks are no installed package
from dlojz.base.table import Table  # noqa: E402

PEAK_NEAR = 0.05
"""Kernels take scratch memory of their own, which nobody who looks at tensors sees (Muon in bf16 on a CPU: 4.4 %)."""
LOSS_NEAR = {"rel_tol": 2e-4, "abs_tol": 1e-4}
LIMIT_S = 600
LINE = re.compile(r"step (\d+)((?: [a-z_]+ (?:-?[\d.]+|nan|-?inf))+)")
"""Its end is not looked for: two ranks that share a pipe may write both lines before both ends."""
CHECK = re.compile(r"(check (?:(?!check |\{').)*(?<=\S))")
"""What a rank prints to be compared; another rank may print on the same line, as `python -u` writes its end apart."""


@dataclass(frozen=True)
class Script:
    """Script, and how its user starts it.

    Args:
        name: in the table.
        file: in `benchmarks/strangers/`; the name by default.
        processes: of torchrun; 0 for plain Python.
        copies: ranks that print the same samples, as those of a tensor-parallel group do.
        as_module: started by `python -m`.
        interrupted_at: Ctrl-C once this line is printed.
        random: its losses are others in every run: they are compared with what the same run prints.
        reason: that the record must give, as a regular expression.
        unseen: quantities that the count does not know of it.
        replaced: vectors of its optimizer that an update makes before it drops the old ones.
        flops: of a step by hand, where a forward pass counts in the step whose backward goes through it.
        measured: whether something must be recorded of it; otherwise a refusal is right.
        daily: whether the daily tests run it.
    """

    name: str
    file: str = ""
    arguments: tuple[str, ...] = ()
    processes: int = 0
    copies: int = 1
    as_module: bool = False
    interrupted_at: str = ""
    random: bool = False
    reason: str = ""
    unseen: tuple[str, ...] = ()
    replaced: int = 0
    flops: tuple[int, ...] = ()
    measured: bool = True
    daily: bool = False

    @property
    def path(self) -> Path:
        """File of the script."""
        return SCRIPTS / f"{self.file or self.name}.py"

    @property
    def style(self) -> str:
        """First line of the script's docstring."""
        return (ast.get_docstring(ast.parse(self.path.read_text(encoding="utf-8"))) or "").splitlines()[0]

    @property
    def target(self) -> tuple[str, ...]:
        """What is started: a file, or `-m` and a module."""
        if self.as_module:
            return "-m", ".".join(self.path.relative_to(SCRIPTS).with_suffix("").parts)
        return (str(self.path),)

    def plain_command(self) -> list[str]:
        """Command of its user."""
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.processes)]
        return [sys.executable, *(launcher if self.processes else ()), *self.target, *self.arguments]

    def watched_command(self) -> list[str]:
        """Command with dlojz."""
        nproc = ["--nproc", str(self.processes)] if self.processes else []
        words = ["--", *self.arguments] if self.arguments else []
        return [sys.executable, "-m", "dlojz", "run", *self.target, *nproc, *words]


ALL = (
    Script("kfold"),
    Script("kfold_kept"),
    Script("phases"),
    # By hand, weights 80·128 and 65·128: of the discriminator's step, then of the generator's, with its forward pass.
    Script("gan", flops=(2 * 64 * (2 * 65 * 128 + 128), 64 * (3 * 65 * 128 + 2 * 80 * 128 + 64 * 128))),
    # By hand, products of both layers: three batches; the slope; two gradients of weights; the gradient of the slope,
    # which goes through the activation's, with zeros.
    Script("wgan", flops=(2 * 16 * ((3 + 1 + 2 + 2 + 2) * 64 * 128 + (3 + 1 + 4 + 1) * 128),)),
    Script("unequal_updates"),
    Script("ema"),
    Script("evaluation"),
    Script("evaluation_no_grad"),
    Script("last_batch"),
    Script("accumulation"),
    Script("accumulation_cloned"),
    Script("accumulation_no_sync", processes=2),
    Script("accumulation_every", processes=2),
    Script("clip_plain"),
    Script("clip_ddp", processes=2, daily=True),
    Script("fsdp2_clip", processes=2),
    Script("fsdp1_full", "fsdp1", ("FULL_SHARD",), 2),
    Script("fsdp1_grad_op", "fsdp1", ("SHARD_GRAD_OP",), 2),
    Script("fsdp1_original", "fsdp1", ("SHARD_GRAD_OP", "original"), 2),
    Script("hsdp", processes=4),
    Script("unused_heads", processes=2),
    Script("unused_plain"),
    Script("frozen"),
    Script("lbfgs", replaced=2),
    Script("muon"),
    Script("adafactor"),
    Script("autocast"),
    Script("several_losses"),
    Script("manual_sgd", measured=False),
    Script("spawn"),
    Script("hogwild", copies=2, random=True),
    Script("lightning", "lightning_fit", ("1", "auto")),
    Script("lightning_ddp", "lightning_fit", ("2", "ddp"), 2),
    Script("lightning_spawn", "lightning_fit", ("2", "ddp_spawn")),
    Script("accelerate", "accelerate_accumulate"),
    Script("accelerate_ddp", "accelerate_accumulate", processes=2),
    Script("trainer"),
    Script("trainer_ddp", "trainer", processes=2),
    Script("zero-0", "zero", ("--stage", "0"), 2),
    # The gradients lie in DeepSpeed's own lists when its optimizer is called.
    Script("zero-1", "zero", ("--stage", "1"), 2, unseen=("gradients",)),
    Script("zero-2", "zero", ("--stage", "2"), 2, unseen=("gradients",)),
    Script("zero-3", "zero", ("--stage", "3"), 2),
    Script("zero_pipeline", processes=2, copies=2),
    Script("tensor_parallel", processes=2, copies=2),
    Script("pipeline", processes=2),
    Script("module", "package/train", ("0.001",), as_module=True),
    Script("module_ddp", "package/train", ("0.001",), 2, copies=2, as_module=True),
    Script("thread"),
    Script("lengths", daily=True),
    Script("growing"),
    Script("nan", reason=r"step 4\b"),
    Script("two_loaders"),
    Script("interrupted", interrupted_at="step 12", random=True),
    Script("exit_code"),
    Script("own_flops"),
    Script("own_mode"),
    Script("data_in_memory"),
    Script("contrastive"),
    Script("two_towers"),
    Script("distillation"),
    Script("recurrent"),
    Script("checkpointing"),
    Script("zero_redundancy", processes=2),
    Script("hook_fp16", "ddp_hook", ("fp16",), 2),
    Script("hook_power", "ddp_hook", ("power",), 2),
    Script("ddp_by_hand", processes=2),
    Script("tp_by_hand", processes=4, copies=2),
    Script("static_graph", processes=2),
    Script("rank_switch"),
    Script("rank_switch_ddp", "rank_switch", processes=2),
)


@dataclass(frozen=True)
class Step:
    """Step as the processes of a script have printed it."""

    losses: dict[str, float]
    samples: float
    tokens: float


@dataclass(frozen=True)
class Printed:
    """Output of a script: its steps, and the lines that must be the same with dlojz."""

    steps: tuple[Step, ...]
    checks: tuple[str, ...]

    @classmethod
    def read(cls, output: str, copies: int) -> Printed:
        """Read the lines `step K loss X samples N` of all processes: means of losses, sums of samples."""
        lines: dict[int, list[dict[str, str]]] = defaultdict(list)
        for found in LINE.finditer(output):
            words = found[2].split()
            lines[int(found[1])].append(dict(zip(words[::2], words[1::2], strict=True)))
        steps = []
        for _, printed in sorted(lines.items()):
            names = dict.fromkeys(name for line in printed for name in line if name.startswith("loss"))
            losses = {name: statistics.fmean(float(line[name]) for line in printed if name in line) for name in names}
            samples, tokens = (
                sum(float(line.get(name, 0)) for line in printed) / copies for name in ("samples", "tokens")
            )
            steps.append(Step(losses, samples, tokens))
        return cls(tuple(steps), tuple(sorted(set(CHECK.findall(output)))))


@dataclass(frozen=True)
class Truth:
    """What a script did without dlojz.

    Args:
        ranks: counts of `benchmarks/strangers_count.py`, by rank.
        peaks: bytes held at the first forward pass, and at most within each step; by rank.
    """

    exit_code: int
    printed: Printed
    ranks: dict[int, dict[str, Any]]
    peaks: dict[int, tuple[int, list[int]]]
    output: str = ""


def run(command: Sequence[str], folder: Path, environment: dict[str, str], script: Script) -> tuple[int, str]:
    """Run a command in a folder, interrupted where its script says so; returns its exit code and its output."""
    with subprocess.Popen(
        command,
        cwd=SCRIPTS if script.as_module else folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        deadline = threading.Timer(LIMIT_S, os.killpg, (process.pid, signal.SIGKILL))
        deadline.start()
        lines = []
        for line in process.stdout:
            lines.append(line)
            if script.interrupted_at and script.interrupted_at in line:
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does it
        code = process.wait()
        deadline.cancel()
    return code, "".join(lines)


def counted(script: Script, folder: Path) -> Truth:
    """Run a script without dlojz and count."""
    counts = folder / "counts"
    counts.mkdir(parents=True)
    shutil.copy(COUNT, counts / "sitecustomize.py")
    environment = {"PYTHONPATH": str(counts), FOLDER: str(counts), "TORCH_FR_BUFFER_SIZE": "100000"}
    code, output = run(script.plain_command(), folder, environment, script)
    ranks, peaks = {}, {}
    for path in sorted(counts.glob("*.json")):
        count = json.loads(path.read_text())
        rank = next(rank for rank in itertools.count(count["rank"]) if rank not in ranks)  # without a group all are 0
        ranks[rank] = count
        first, largest = allocator_peaks(path.with_suffix(".log").read_bytes())
        shared = count["largest"].get("shared", 0)
        peaks[rank] = first + shared, [peak + shared for peak in largest]
    errors = "" if ranks else "\n".join(path.read_text(errors="replace")[-2000:] for path in counts.glob("*.log"))
    return Truth(code, Printed.read(output, script.copies), ranks, peaks, output + errors)


def truth_of(script: Script, folder: Path, kept: Path | None) -> Truth:
    """Count a script, or read its count where one of the same text is kept."""
    started = (script.target, script.arguments, script.processes, script.copies, script.interrupted_at)
    parts = (script.path.read_bytes(), COUNT.read_bytes(), repr(started).encode())
    name = f"{script.name}-{hashlib.sha256(b''.join(parts)).hexdigest()[:12]}.json"
    if kept is not None and (kept / name).is_file():
        content = json.loads((kept / name).read_text())
        printed_steps = tuple(Step(**step) for step in content["printed"]["steps"])
        printed = Printed(printed_steps, tuple(content["printed"]["checks"]))
        ranks = {int(rank): count for rank, count in content["ranks"].items()}
        peaks = {int(rank): (first, steps) for rank, (first, steps) in content["peaks"].items()}
        return Truth(content["exit_code"], printed, ranks, peaks)
    truth = counted(script, folder)
    if kept is not None and truth.ranks:
        kept.mkdir(parents=True, exist_ok=True)
        (kept / name).write_text(json.dumps({**asdict(truth), "output": ""}))
    return truth


Verdict = Literal["right", "unknown", "wrong", "none"]
SIGN: dict[Verdict, str] = {"right": "✓", "unknown": "—", "wrong": "✗", "none": "·"}


@dataclass(frozen=True)
class Cell:
    """Verdict on one quantity, with both values."""

    verdict: Verdict
    recorded: str = ""
    counted: str = ""


NOTHING = Cell("none")


def cell(recorded: Any, truths: Iterable[Any], near: Callable[[Any, Any], bool] = lambda one, two: one == two) -> Cell:
    """Judge a recorded value: right where it is one of the true ones; no true value is known to be none."""
    known = [truth for truth in truths if truth is not None]
    if not known:
        return NOTHING
    if recorded is None:
        return Cell("unknown", "—", written(known[0]))
    verdict: Verdict = "right" if any(near(recorded, truth) for truth in known) else "wrong"
    return Cell(verdict, written(recorded), written(known[0]))


def written(value: Any) -> str:
    """Write a value on one line."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {written(each)}" for name, each in sorted(value.items())) or "nothing"
    if isinstance(value, list | tuple):
        ends = (*value[:4], "…", *value[-3:]) if len(value) > 8 else value
        return f"{len(value)}: [{', '.join(map(written, ends))}]"
    return f"{value:,}" if isinstance(value, int) else str(value)


def near_losses(recorded: Sequence[float], truth: Sequence[float]) -> bool:
    """Whether two series of losses are the same."""
    return len(recorded) == len(truth) and all(
        math.isclose(one, two, **LOSS_NEAR) for one, two in zip(recorded, truth, strict=True)
    )


def near_peak(recorded: float, truth: float) -> bool:
    """Whether a peak is near enough."""
    return abs(recorded - truth) <= PEAK_NEAR * truth


KINDS = {"reduce_scatter": "all_reduce"}
"""gloo carries out a reduce-scatter as an all-reduce of the same message, and its recorder calls it so."""


def traffic(footprint: dict[str, Any]) -> dict[str, int]:
    """Sum a footprint's bytes by collective over all its lists of messages, without the lab's own."""
    total: Counter[str] = Counter()
    for messages in footprint.values():
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, dict) and "collective" in message and message.get("group") != "control":
                kind = str(message["collective"])
                total[KINDS.get(kind, kind)] += message["message_bytes"]
    return {kind: size for kind, size in total.items() if size}


def counted_traffic(count: dict[str, Any]) -> list[dict[str, int]]:
    """List what a step sends: the most common step, then the one that sends most."""
    steps: list[dict[str, int]] = []
    for counted_step in count["step_messages"][2:] or count["step_messages"]:
        total: Counter[str] = Counter()
        for kind, size in counted_step.items():
            total[KINDS.get(kind, kind)] += size
        steps.append({kind: size for kind, size in total.items() if size})
    if not steps:
        return []
    common = Counter(json.dumps(step, sort_keys=True) for step in steps).most_common(1)[0][0]
    return [json.loads(common), max(steps, key=lambda step: sum(step.values()))]


def counted_flops(count: dict[str, Any], *, every: bool = False) -> list[int]:
    """List the FLOPs of a step: the most common number, the largest, or those of every step; none where none count.

    First without forward passes under no_grad, which are no training, then with them.
    """
    flops = []
    for name in ("step_trained_flops", "step_flops"):
        steps: list[int] = count[name][2:] or count[name]
        if any(steps):
            flops += [Counter(steps).most_common(1)[0][0], max(steps), *(steps if every else ())]
    return flops


def of_all(cells: Sequence[Cell]) -> Cell:
    """Sum up cells: the first wrong one of them, else the first unknown one, else the first right one."""
    for verdict in ("wrong", "unknown", "right"):
        if chosen := [each for each in cells if each.verdict == verdict]:
            return chosen[0]
    return NOTHING


STATES = ("weights", "gradients", "optimizer", "buffers")


@dataclass
class Result:
    """Result of one script, quantity by quantity."""

    script: str
    cells: dict[str, Cell] = field(default_factory=dict)
    note: str = ""

    @property
    def wrong(self) -> list[str]:
        """Lines of what is wrong."""
        return [
            f"{self.script:<20} {name:<18} recorded {each.recorded}   counted {each.counted}"
            for name, each in self.cells.items()
            if each.verdict == "wrong"
        ]


def series(record: dict[str, Any], steps: Sequence[Step]) -> Iterator[tuple[str, Cell]]:
    """Judge steps, losses, samples and tokens."""
    recorded_steps = len(record.get("step_s") or record.get("losses") or ())
    yield "steps", cell(None if record.get("watch_ended") else recorded_steps, [len(steps)])
    finite = [step.losses for step in steps]
    bad = next((i for i, losses in enumerate(finite) if not all(map(math.isfinite, losses.values()))), len(finite))
    finite = finite[:bad]
    names = list(dict.fromkeys(name for losses in finite for name in losses))
    truths = [[losses[name] for losses in finite if name in losses] for name in names]
    truths += [[sum(losses.values()) for losses in finite], [statistics.fmean(losses.values()) for losses in finite]]
    recorded = list(record.get("losses") or ())[: bad if bad < len(steps) else None]
    yield "losses", cell(recorded or None, truths, near_losses) if names else NOTHING
    if len(names) > 1:
        for name, values in (record.get("named_losses") or {}).items():
            yield f"loss {name}", cell(list(values), truths[: len(names)], near_losses)
    footprint = (record.get("footprints") or [{}])[0]
    speed, step_s = footprint.get("samples_per_s"), (footprint.get("phases") or {}).get("step_s")
    samples = [step.samples for step in steps]
    typical = [statistics.median(samples[3:] or samples), statistics.median(samples)]
    batch = speed * step_s if speed and step_s else None
    yield "samples/step", cell(batch, typical, lambda one, two: math.isclose(one, two, rel_tol=1e-6))
    seen = list(record.get("step_samples") or ())
    yield "samples", cell(seen if seen and all(seen) else None, [list(map(int, samples))])
    tokens = [int(step.tokens) for step in steps]
    told = list(record.get("step_tokens") or ()) or None
    yield "tokens", cell(told, [tokens] if any(tokens) else [])


def judged(script: Script, truth: Truth, record: dict[str, Any] | None, code: int, output: str) -> Result:
    """Compare the record of a run with the count."""
    result = Result(script.name)
    cells = result.cells
    printed = Printed.read(output, script.copies)
    same_code = code if not script.processes else int(bool(code))
    cells["exit code"] = cell(same_code, [truth.exit_code])
    cells["output"] = cell(printed.checks, [truth.printed.checks])
    if not script.random:
        shown = [list(step.losses.values()) for step in printed.steps]
        true = [list(step.losses.values()) for step in truth.printed.steps]
        same = len(shown) == len(true) and all(map(near_losses, shown, true))
        if not same and "nan" not in str(true):
            cells["output"] = Cell("wrong", written(shown), written(true))
    if not script.measured and record is not None and not record.get("losses"):
        result.note = record.get("reason") or ""
        cells |= {name: Cell("unknown") for name in ("exit code", *COLUMNS[2:])}
        return result
    if record is None:
        lines = [line for line in output.splitlines() if line.strip()]
        result.note = next((line for line in lines if "dlojz" in line), lines[-1] if lines else "")[:200]
        return result
    result.note = record.get("reason") or (record.get("script_prediction") or {}).get("note") or ""
    steps = printed.steps if script.random else truth.printed.steps
    cells |= dict(series(record, steps))
    if script.reason and not re.search(script.reason, record.get("reason") or ""):
        cells["reason"] = Cell("wrong", record.get("reason") or "", script.reason)
    if script.interrupted_at and record.get("status") == "completed":
        cells["reason"] = Cell("wrong", "completed", "interrupted")
    measured = {footprint["rank"]: footprint for footprint in record.get("footprints") or ()}
    cells |= of_footprints(truth, measured, ranks=list(truth.ranks))
    cells |= dict(by_hand(script, truth, measured.get(0)))
    prediction = record.get("script_prediction") or {}
    predicted = prediction.get("footprint")
    if predicted is None:
        cells |= {f"predicted {name}": Cell("unknown") for name in ("states", "peak", "bytes", "FLOPs")}
        return result
    # A step of the batch that is named is predicted, without what the script holds besides: any step may be that.
    first = of_footprints(truth, {0: predicted}, ranks=[0])
    cells["predicted states"] = of_all([first[name] for name in STATES])
    cells["predicted FLOPs"] = cell(predicted.get("step_flops"), counted_flops(truth.ranks[0], every=True))
    before, peaks = truth.peaks[0]
    kept = before - truth.ranks[0].get("expected_bytes", before)
    buckets = truth.ranks[0]["largest"].get("gradients") or 0 if len(truth.ranks) > 1 else 0  # DDP's, there before
    others = {kept, kept - buckets} if kept > buckets else {kept}
    peaks = [max(peaks), *peaks[2:], *(peak - each for peak in peaks[2:] for each in others)]
    cells["predicted peak"] = cell(predicted["memory"].get("peak_bytes"), peaks, near_peak)
    cells |= dict(said_to_differ(record, measured.get(0) or {}, cells))
    if not prediction.get("messages_known", True):
        cells["predicted bytes"] = Cell("unknown")
    elif 0 in measured:
        messages = measured[0].get("communication") or ()
        driven = [each for each in messages if each.get("origin", "wrapper") == "wrapper"]  # all others are counted
        cells["predicted bytes"] = cell(traffic({"": predicted.get("communication")}), [traffic({"": driven})])
    return result


def said_to_differ(
    record: dict[str, Any], measured: dict[str, Any], cells: dict[str, Cell]
) -> Iterator[tuple[str, Cell]]:
    """Yield the peaks that are not the count's and of which the record or its table says why: unknown ones."""
    names = ["predicted peak"] if (measured.get("memory") or {}).get("peak_moment") == "no_grad" else []
    if any("scratch memory" in note for note in record.get("notes") or ()):
        names = ["peak", "predicted peak"]
    for name in names:
        if cells[name].verdict == "wrong":
            yield name, replace(cells[name], verdict="unknown")


def by_hand(script: Script, truth: Truth, measured: dict[str, Any] | None) -> Iterator[tuple[str, Cell]]:
    """Judge what was worked out by hand for a script, where the count has not the same quantity."""
    if measured is None:
        return
    if script.flops:
        yield "FLOPs", cell(measured.get("step_flops"), script.flops)
    if script.replaced:
        largest = truth.ranks[0]["largest"]
        truths = [largest["optimizer"] + number * largest["weights"] for number in range(script.replaced + 1)]
        yield "optimizer", cell(measured["memory"]["optimizer_bytes"], truths)


def of_footprints(truth: Truth, footprints: dict[int, dict[str, Any]], ranks: Sequence[int]) -> dict[str, Cell]:
    """Judge footprints, rank by rank."""
    found: dict[str, list[Cell]] = defaultdict(list)
    for rank in ranks:
        count, footprint = truth.ranks.get(rank), footprints.get(rank, {})
        if count is None:
            continue
        memory = footprint.get("memory") or {}
        sent = traffic(footprint) if footprint else None
        if len(truth.ranks) == 1 and not any(counted_traffic(count)):
            hidden = (footprint.get("phases") or {}).get("communication_hidden_s")
            found["bytes"].append(Cell("wrong", f"hidden {hidden} s", "no messages") if hidden or sent else NOTHING)
        else:
            found["bytes"].append(cell(sent, counted_traffic(count)))
        for name in STATES:
            sizes = [count["largest"].get(name)]
            if name == "weights":  # with those of a root that FSDP keeps whole from forward to backward, or without
                sizes.append(count["largest"].get("weights_after_forward"))
            found[name].append(cell(memory.get(f"{name}_bytes"), sizes))
        peaks = truth.peaks[rank][1]
        # gloo's threads may hold a message for a moment after it has arrived, in one step and not in another.
        steady = [max(peaks), min(peaks[2:] or peaks)] if len(truth.ranks) > 1 else [max(peaks)]
        found["peak"].append(cell(memory.get("peak_bytes"), steady, near_peak))
        found["FLOPs"].append(cell(footprint.get("step_flops"), counted_flops(count)))
    return {name: of_all(cells) for name, cells in found.items()}


def watched(script: Script, folder: Path) -> tuple[dict[str, Any] | None, int, str]:
    """Run a script under dlojz: its record if there is one, exit code, output."""
    runs = folder / "runs"
    path = os.environ.get("PYTHONPATH") or str(ROOT)  # of another dlojz, if one is given
    code, output = run(script.watched_command(), folder, {"DLOJZ_RUNS": str(runs), "PYTHONPATH": path}, script)
    records = sorted(runs.glob("*/record.json"))
    # The terminal shows rank 0 alone, each rank's log what it has printed.
    logs = [path.read_text(errors="replace") for path in sorted(runs.glob("*/logs/rank-*.log"))]
    printed = "\n".join(logs) if any(map(LINE.search, logs)) else output
    return (json.loads(records[-1].read_text()) if records else None), code, printed


def outcome(script: Script, kept: Path | None = None) -> Result:
    """Run a script with and without dlojz, and compare."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        truth = truth_of(script, folder / "plain", kept)
        for count in truth.ranks.values():
            count["largest"] |= dict.fromkeys(script.unseen)
        if not truth.ranks:
            last = truth.output.strip().splitlines()[-1:] or [""]
            return Result(script.name, note=f"does not run without dlojz either: {last[0][:150]}")
        (folder / "watched").mkdir()
        return judged(script, truth, *watched(script, folder / "watched"))


COLUMNS = (
    *("exit code", "output", "steps", "losses", "samples/step", "samples", "tokens", "bytes", *STATES, "peak", "FLOPs"),
    *("predicted states", "predicted peak", "predicted bytes", "predicted FLOPs"),
)


def table(results: Sequence[Result]) -> Table:
    """Lay out the verdicts, and below them what is wrong."""
    heads = [name.replace("predicted", "pred.") for name in COLUMNS]
    rows = tuple(
        (result.script, *(SIGN[result.cells.get(name, NOTHING).verdict] for name in COLUMNS)) for result in results
    )
    verdicts = Counter(each.verdict for result in results for each in result.cells.values())
    summary = (
        f"{len(results)} scripts: {verdicts['right']} right, {verdicts['unknown']} said to be unknown (—), "
        f"{verdicts['wrong']} WRONG (✗)"
    )
    return Table(("script", *heads), rows, align="l" + "c" * len(COLUMNS), whole=1, notes=(summary,))


def main(
    only: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    list_scripts: Annotated[bool, tyro.conf.arg(name="list")] = False,
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
    kept: Path | None = None,
) -> int:
    """Run scripts with and without dlojz, and compare.

    Args:
        only: one script, by its name; may be given several times.
        list_scripts: list the scripts and whose style they are in.
        json_file: also write all values.
        kept: folder in which counts without dlojz are kept: a script that has not changed is not counted again.
    """
    if list_scripts:
        for script in ALL:
            print(f"{script.name:<20} {script.style}")
        return 0
    if unknown := sorted(set(only) - {script.name for script in ALL}):
        print(f"There is no script {', '.join(unknown)}: --list shows all.", file=sys.stderr)
        return 2
    results = []
    scripts = {script.name: script for script in ALL}
    for script in (scripts[name] for name in only or scripts):
        results.append(outcome(script, kept))
        nothing = "nothing wrong" if results[-1].cells else results[-1].note
        print(*(results[-1].wrong or [f"{script.name:<20} {nothing}"]), sep="\n", file=sys.stderr, flush=True)
        if json_file is not None:
            json_file.write_text(json.dumps([asdict(result) for result in results], indent=1, ensure_ascii=False))
    Console(width=200).print(table(results))
    for result in results:
        for line in (*result.wrong, *([f"{result.script:<20} ({result.note})"] if result.note else [])):
            print(line)
    if any(not result.cells for result in results):
        return 2
    return int(any(result.wrong for result in results))


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
