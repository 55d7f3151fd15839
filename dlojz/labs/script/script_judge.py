"""Judge a training script by what it does on real processes; its text is never read.

The script runs under the watch of `dlojz.run` (`ScriptTrials`), and `rank_observer.py` of the libraries notes what each
rank read, held and saved. Layouts are compared with one process of the same script: the same losses, of the same
samples.
"""

import itertools
import math
import re
import shlex
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dlojz.base.errors import LabError
from dlojz.base.language import format_bytes, integer, percent, say, significant
from dlojz.base.requirements import distribution_of, extra_of, missing_library
from dlojz.compare import compare
from dlojz.config.run_config import Observation
from dlojz.labs.kit.exercise import Said, Sentences, Verdict, Wrong, show
from dlojz.labs.kit.lab import SCRIPT, Lab
from dlojz.labs.script.growing_script import LAYOUTS, number_of_lab
from dlojz.libraries.scripts.script_parity import (
    SAME_LOSS,
    SAME_ON_ONE,
    SHARED_SAMPLES,
    Trial,
    check_averaged,
    check_gradients,
    check_group,
    check_losses,
    check_orders,
    check_saves,
    check_shares,
    check_steps,
    check_trained_alike,
    differing_step,
    rank_reports,
    title_of,
)
from dlojz.results.record import RunRecord
from dlojz.running.launch import run
from dlojz.running.store import runs_root

TEXTS = Sentences(Path(__file__).with_suffix(".md"))

BATCH = 256
SHORT = ("--epochs", "2", "--batch", str(BATCH))
"""Options of every run: two epochs, to see whether the second has another order."""
_RATE = re.compile(r"^samples/s (\d+(?:\.\d+)?)$", re.MULTILINE)
_MISSING_MODULE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
_LOSS = re.compile(r"^loss (\d+(?:\.\d+)?)$", re.MULTILINE)

SAME_PRINTED = 1.3
"""Factor by which the loss that a rank prints, of the samples it reads, may differ from the mean of all ranks."""
ROUNDED_LOSS = 0.01
"""Relative distance of losses, where gradients are rounded to bf16."""
SAME_RATE = 1.4
"""Factor by which a script's own throughput may differ from the one that is measured from outside."""
STILL = 3
"""Parameters that may have no gradient without being told."""
LEVELS = 3
"""Folders above the notebook's in which its script is looked for."""


class LibraryMissing(Exception):  # noqa: N818 - it is a verdict, not an error of the program
    """Raised by a run whose script imports a library of the course that is not installed; the sentence names both."""


class ScriptTrials:
    """Runs of one script for its judge.

    Args:
        path: the script.
        folder: for the runs.
        begin: told the title of each run before it starts.
        where: arguments of `dlojz.run`: on which processes.
    """

    def __init__(self, path: Path, folder: Path, begin: Callable[[str], object], placement: Mapping[str, Any]) -> None:
        self._path, self._folder, self._begin, self._where = path, folder, begin, placement
        self.done: list[Trial] = []
        self.not_judged: list[str] = []

    @property
    def checkpoint(self) -> str:
        """A folder for checkpoints of the script."""
        return str(self._folder / "checkpoint")

    def layout(self, lab: int, *words: str) -> Trial:
        """Run the script in the layout that a lab adds, with further options."""
        processes, options = LAYOUTS[lab]
        return self(processes, *options, *words)

    def __call__(self, processes: int, *words: str) -> Trial:
        """Run the script to its end.

        Raises:
            Wrong: if it does not end as it should; the sentence says how it ended.
            LibraryMissing: if it needs a library of the course that is not installed.
        """
        self._begin(title := title_of(processes, words))
        ended = run(
            self._path,
            args=[*SHORT, *words],
            processes=processes,
            observation=Observation(),
            root=self._folder / "runs",
            progress=False,
            **self._where,
        )
        record, ranks = ended.record, rank_reports(ended.folder, processes)
        if record is None or record.status != "completed":
            _refuse_missing_library(title, ended.logs())
        check_steps(title, ranks)
        # A rank that left no report has not come to its end either.
        completed = record is not None and record.status == "completed" and len(ranks) == processes
        if not completed and any(report.late_shards for report in ranks):
            raise TEXTS.wrong("trials", "does not come to its end, fully_shard on a running block", processes=title)
        if record is None or not completed:
            raise Wrong(_how_it_ended(self._path, title, ended.logs(), record))
        logs = [ended.logs(rank) for rank in range(processes)]
        rates, printed = (tuple(tuple(map(float, line.findall(log))) for log in logs) for line in (_RATE, _LOSS))
        self.done.append(Trial(words, record, ranks, ended.folder, rates, printed))
        return self.done[-1]


def _refuse_missing_library(title: str, log: str) -> None:
    # The last one: a script may try one import and go on with another.
    module = (_MISSING_MODULE.findall(log) or [""])[-1]
    if extra_of(distribution_of(module)):
        absent = missing_library(distribution_of(module))
        raise LibraryMissing(say(en=f"Not judged on {title}: {absent}", fr=f"Non vérifié sur {title} : {absent}"))


def _how_it_ended(path: Path, title: str, log: str, record: RunRecord | None) -> str:
    """Say how a run failed: the script's last line of error, else the reason of the record."""
    unknown = next((line for line in log.splitlines() if "error: unrecognized arguments:" in line), None)
    invalid = next((line for line in log.splitlines() if ": error: argument " in line), None)
    if unknown or invalid:
        complaint = (unknown or invalid or "").partition("error: ")[2].strip()
        if unknown:  # by their names: a value may be a path that the judge has made
            complaint = ", ".join(re.findall(r"--[a-z0-9-]+", complaint)) or complaint
        return TEXTS.say("trials", "options of this lab not taken", complaint=complaint)
    reason = record.reason.strip() if record is not None else ""
    # Lines of the script itself in the tracebacks, the innermost last.
    line_numbers = re.findall(rf'File "[^"]*{re.escape(path.name)}", line (\d+)', log)
    if line_numbers and f"line {line_numbers[-1]}" not in reason:
        reason += say(en=f" (line {line_numbers[-1]} of {path.name})", fr=f" (ligne {line_numbers[-1]} de {path.name})")
    if todos := path.read_text(encoding="utf-8").count("TODO"):
        reason += say(en=f". Places still marked TODO: {todos}", fr=f". Endroits encore marqués TODO : {todos}")
    if "Connection closed by peer" in reason:
        reason += TEXTS.say("trials", "a rank waits for others that have gone")
    return TEXTS.say("trials", "does not come to its end", title=title, reason=reason)


def _check_learns(trial: Trial, factor: float) -> None:
    """Refuse a run whose last loss is more than so many times the first."""
    losses = trial.record.losses
    if not losses or not all(map(math.isfinite, losses)):
        raise TEXTS.wrong("checks", "no finite loss")
    if losses[-1] > factor * losses[0]:
        raise TEXTS.wrong(
            "checks",
            "the loss does not fall",
            first_loss=significant(losses[0], 4),
            last_loss=significant(losses[-1], 4),
        )


def _check_printed(trial: Trial) -> None:
    """Refuse a script that prints a loss of each step which is not that of the step."""
    for printed in trial.printed:
        # Only a script that prints one loss per step can be compared.
        if len(printed) != len(trial.record.losses):
            continue
        for step, (printed_loss, loss) in enumerate(zip(printed, trial.record.losses, strict=True), start=1):
            if not loss / SAME_PRINTED < printed_loss < loss * SAME_PRINTED:
                pair = significant(printed_loss, 4), significant(loss, 4)
                raise TEXTS.wrong(
                    "checks", "another loss is printed", title=trial.title, first=pair[0], step=step, second=pair[1]
                )


def _check_samples(base: Trial, many: Trial, replicas: int) -> None:
    """Refuse replicas that read the same samples, too many of them, or each epoch in one order."""
    check_shares(many, replicas)
    steps = [len(trial.record.losses) for trial in (base, many)]
    if steps[0] != steps[1]:
        en = f"Two epochs are {steps[0]} steps with {base.title}, and {steps[1]} with {many.title}: "
        fr = f"Deux époques font {steps[0]} pas avec {base.title}, et {steps[1]} avec {many.title} : "
        # Samples of a step, if every replica reads as many as rank 0.
        samples_per_step = replicas * sum(map(len, many.ranks[0].epochs)) / max(steps[1], 1)
        if math.isclose(samples_per_step, BATCH, rel_tol=SHARED_SAMPLES) and steps[1] < steps[0]:
            raise TEXTS.wrong("checks", "samples are left out", en=en, fr=fr)
        on_average = TEXTS.sentence("checks", "mean samples of a step", samples_per_step=integer(samples_per_step))
        reads = on_average if samples_per_step else Said("", "")  # a script may read without a DataLoader
        raise TEXTS.wrong("checks", "another number of samples per step", en=en, BATCH=BATCH, reads=reads, fr=fr)
    for trial in (base, many):
        check_orders(trial)


def _check_parity(base: Trial, many: Trial, replicas: int) -> None:
    """Refuse a layout that does not train as one process does, with the cause where it is seen."""
    check_group(many)
    _check_samples(base, many, replicas)
    # Each rank is a replica: then all of them must average with all.
    if replicas == len(many.ranks):
        check_averaged(many)
    check_trained_alike(base, many, are_same=_same_samples(base, many, replicas))
    check_saves(many)


def _same_samples(base: Trial, many: Trial, replicas: int) -> bool:
    """Whether the first step of both reads the same samples."""
    # A tuple for each replica: the samples of its first step; ranks of one replica give the same tuple.
    shares = {rank.epochs[0][: BATCH // replicas] for rank in many.ranks if rank.epochs}
    return bool(base.ranks[0].epochs) and sorted(itertools.chain.from_iterable(shares)) == sorted(
        base.ranks[0].epochs[0][:BATCH]
    )


def _check_shards(base: Trial, many: Trial, max_share: float, cause: Said) -> None:
    """Refuse ranks that hold more than a share of the parameters, or that have lost some of them."""
    total = base.ranks[0].held
    sizes = [rank.held for rank in many.ranks]
    if max(sizes) > max_share * total:
        raise TEXTS.wrong(
            "checks",
            "another share of the parameters",
            title=many.title,
            share=percent(max(sizes) / total),
            cause=cause,
        )
    if sum(sizes) < total:
        raise TEXTS.wrong("checks", "a part of the model is lost", title=many.title, share=percent(sum(sizes) / total))


def _plain(trials: ScriptTrials) -> None:
    _check_learns(trials(1), 0.9)


def _transformer(trials: ScriptTrials) -> None:
    trial = trials(1)
    _check_learns(trial, 1.1)
    if trial.ranks[0].blocks < 2:
        raise TEXTS.wrong("judge", "no equal blocks")


def _memory(trials: ScriptTrials) -> None:
    plain, checkpointed = trials(1), trials(1, "--checkpointing")
    if (uses := plain.ranks[0].uses) > 1:
        raise TEXTS.wrong("judge", "a layer runs twice without checkpointing", uses=uses)
    check_losses(plain, checkpointed, SAME_ON_ONE, TEXTS.sentence("judge", "checkpointing changes no loss"))
    sizes = [trial.activations_bytes for trial in (plain, checkpointed)]
    if sizes[1] > 0.9 * sizes[0]:
        raise TEXTS.wrong(
            "judge",
            "checkpointing keeps too much",
            checkpointed_bytes=format_bytes(sizes[1]),
            plain_bytes=format_bytes(sizes[0]),
        )
    _check_rounded(plain, trials(1, "--bf16"))


def _check_rounded(plain: Trial, rounded: Trial) -> None:
    """Refuse a run with --bf16 whose losses are those of the run without it, or far from them."""
    if differing_step(plain.record.losses, rounded.record.losses, 0.0) is None:
        raise TEXTS.wrong("judge", "no autocast", title=rounded.title)
    check_losses(plain, rounded, 0.05, TEXTS.sentence("judge", "bf16 changes a loss little"))


def _data_parallel(trials: ScriptTrials) -> None:
    two = trials(2)
    check_group(two)
    if two.ranks[0].ddp > 1:
        raise TEXTS.wrong("judge", "not one DistributedDataParallel", wrapped=two.ranks[0].ddp)
    check_saves(two)
    _check_samples(two, two, replicas=2)
    check_averaged(two)
    accumulated = trials(2, "--accumulation", "2")
    _check_samples(two, accumulated, replicas=2)
    # As much as without accumulation under no_sync, twice as much without: 1.5 lies between.
    if accumulated.sent_bytes > 1.5 * two.sent_bytes:
        raise TEXTS.wrong(
            "judge",
            "accumulation sends too much",
            sent_bytes=format_bytes(accumulated.sent_bytes),
            plain_bytes=format_bytes(two.sent_bytes),
        )
    check_gradients(two, accumulated)
    base = trials(1)
    for many in (two, accumulated):
        _check_parity(base, many, replicas=2)


def _sharded(trials: ScriptTrials) -> None:
    folder = trials.checkpoint
    two, base = trials.layout(4, "--accumulation", "2", "--save", folder), trials(1)
    check_group(two)
    _check_shards(base, two, 0.6, TEXTS.sentence("judge", "fully_shard on each block"))
    if two.ranks[0].fsdp_units < 2:
        raise TEXTS.wrong("judge", "fully_shard on the whole model alone")
    if two.ranks[0].plain:
        raise TEXTS.wrong("judge", "parameters on every rank", plain=percent(two.ranks[0].plain / base.ranks[0].held))
    _check_parity(base, two, replicas=2)
    resumed_run = trials.layout(4, "--load", folder)
    if differing_step(two.record.losses[:1], resumed_run.record.losses[:1], SAME_ON_ONE) is None:
        raise TEXTS.wrong("judge", "load changes nothing")
    if not resumed_run.ranks[0].moments:
        raise TEXTS.wrong("judge", "moments are not loaded")
    single_run = trials(1, "--load", folder)
    check_losses(single_run, resumed_run, SAME_LOSS, TEXTS.sentence("judge", "one process reads what two wrote"))


def _pipeline(trials: ScriptTrials) -> None:
    two, base = trials.layout(5), trials(1)
    check_group(two)
    _check_shards(base, two, 0.7, TEXTS.sentence("judge", "the stage's blocks only"))
    # More than 1: something outside of the blocks is held by both stages.
    if (together := sum(rank.held for rank in two.ranks) / base.ranks[0].held) > 1:
        raise TEXTS.wrong("judge", "too much of the model together", together=percent(together))
    _check_parity(base, two, replicas=1)
    if two.ranks[0].schedule != "Schedule1F1B":
        name = two.ranks[0].schedule
        schedule = Said(
            name or "none of torch.distributed.pipelining", name or "étranger à torch.distributed.pipelining"
        )
        raise TEXTS.wrong("judge", "another schedule", schedule=schedule)
    if (cut := two.ranks[0].micro_batches) != 4:
        raise TEXTS.wrong("judge", "another number of micro-batches", cut=cut)
    _check_rounded(two, trials.layout(5, "--bf16"))


def _tensor_parallel(trials: ScriptTrials) -> None:
    two, base = trials.layout(6), trials(1)
    check_group(two)
    if two.ranks[0].plain == base.ranks[0].held:
        raise TEXTS.wrong("judge", "no parameter is divided", title=two.title)
    _check_shards(base, two, 0.8, TEXTS.sentence("judge", "names of the plan"))
    rank0 = two.ranks[0]
    if rank0.plain < rank0.held and not rank0.by_rows:
        raise TEXTS.wrong("judge", "columns without rows", title=two.title, by_columns=rank0.by_columns)
    _check_parity(base, two, replicas=1)


def _two_axes(trials: ScriptTrials) -> None:
    four, base = trials.layout(7), trials(1)
    check_group(four)
    if four.ranks[0].mesh_axes < 2:
        raise TEXTS.wrong("judge", "no mesh of two axes")
    _check_shards(base, four, 0.45, TEXTS.sentence("judge", "split along tp and dp"))
    for row in {rank.mesh_row for rank in four.ranks}:
        samples = {rank.epochs for rank in four.ranks if rank.mesh_row == row}
        if len(samples) > 1:
            raise TEXTS.wrong("judge", "parts of one model read different samples", title=four.title)
    _check_parity(base, four, replicas=2)
    _check_parity(base, trials.layout(6), replicas=1)  # on a mesh of two axes, tp takes its own


def _measured(trials: ScriptTrials) -> None:
    for trial in (trials(1), trials(2, "--accumulation", "2")):
        check_group(trial)
        _check_rate(trial)


def _check_rate(trial: Trial) -> None:
    """Refuse a script that prints no throughput of its epochs, or another one than was measured from outside."""
    rates, *other_rates = trial.rates
    if any(other_rates):
        raise TEXTS.wrong("judge", "several ranks print the rate", title=trial.title)
    if len(rates) != 2:
        raise TEXTS.wrong("judge", "another number of lines", title=trial.title, rates_count=len(rates))
    seconds = trial.record.step_s
    # In s: the second half of the steps is the second epoch.
    rate = BATCH * (len(seconds) // 2) / math.fsum(seconds[len(seconds) // 2 :])
    times = rates[1] / rate
    if not 1 / SAME_RATE < times < SAME_RATE:
        texts = f"{significant(rates[1], 3)} samples/s", f"{significant(rate, 3)}"
        raise TEXTS.wrong("judge", "another rate than measured", title=trial.title, printed=texts[0], measured=texts[1])


def _compressed(trials: ScriptTrials) -> None:
    small, plain = trials.layout(9), trials(2)
    check_group(small)
    check_averaged(small)
    # bf16 halves the bytes of the gradients; 0.6 leaves room for what else is sent.
    if small.sent_bytes > 0.6 * plain.sent_bytes:
        raise TEXTS.wrong(
            "judge",
            "compression sends too much",
            sent_bytes=format_bytes(small.sent_bytes),
            plain_bytes=format_bytes(plain.sent_bytes),
        )
    mean = TEXTS.sentence("judge", "the hook returns no mean")
    check_gradients(plain, small, mean)
    if not small.ranks[0].fused:
        raise TEXTS.wrong("judge", "fused changes nothing")
    check_losses(plain, small, ROUNDED_LOSS, TEXTS.sentence("judge", "gradients in bf16"))


def _experts(trials: ScriptTrials) -> None:
    two, base = trials.layout(10), trials(1, "--experts", "4")
    check_group(two)
    footprint = two.record.footprint()
    if footprint is None or all(traffic.collective != "all_to_all" for traffic in footprint.communication):
        raise TEXTS.wrong("judge", "no all-to-all")
    _check_shards(base, two, 0.7, TEXTS.sentence("judge", "the share of the experts"))
    _check_samples(base, two, replicas=2)
    check_losses(base, two, SAME_LOSS, TEXTS.sentence("judge", "places of the tokens"), steps=1)
    mean = TEXTS.sentence("judge", "gradients of experts")
    check_gradients(base, two, mean)
    check_losses(base, two, SAME_LOSS, TEXTS.sentence("judge", "order of the tokens"))


def _compressed_model(trials: ScriptTrials) -> None:
    (_, *words), two = LAYOUTS[11][1], trials.layout(11)
    base = trials(1, "--quantize", *words)
    if (levels := max(base.ranks[0].levels, default=0)) > 255:
        raise TEXTS.wrong("judge", "too many values of a quantized matrix", levels=levels)
    if (still := base.ranks[0].gradients.count(0.0)) > STILL:
        raise TEXTS.wrong("judge", "no gradient through the rounding", still=still)
    _check_learns(base, 1.0)
    for trial in (base, two):
        share = trial.ranks[0].zeros / trial.ranks[0].matrices
        if not 0.45 < share < 0.55:
            raise TEXTS.wrong("judge", "another share of zeros", title=trial.title, share=percent(share))
    _check_parity(base, two, replicas=2)


def _libraries(trials: ScriptTrials) -> None:
    base: Trial | None = None
    for library, name in (("deepspeed", "DeepSpeedEngine"), ("accelerate", "Accelerator")):
        try:
            two = trials(2, "--parallel", library, "--accumulation", "2")
        except LibraryMissing as missing:
            if library != "accelerate":
                raise
            trials.not_judged.append(str(missing))  # Accelerate is optional
            continue
        base = base or trials(1)
        if (engine := two.ranks[0].library) != name:
            trainer = Said(engine or "PyTorch alone", engine or "PyTorch seul")
            raise TEXTS.wrong("judge", "another engine trains", title=two.title, engine=trainer, name=name)
        if name == "DeepSpeedEngine":
            _check_shards(base, two, 0.6, TEXTS.sentence("judge", "a stage of DeepSpeed"))
            check_group(two)
            _check_samples(base, two, replicas=2)
            check_gradients(base, two)
            check_losses(
                base, two, ROUNDED_LOSS, TEXTS.sentence("judge", "DeepSpeed divides by the micro-batches"), steps=3
            )
            check_losses(base, two, SAME_LOSS, TEXTS.sentence("judge", "DeepSpeed clips"))
        else:
            if not two.sent_bytes:
                raise TEXTS.wrong("judge", "no gradient is sent", title=two.title)
            _check_parity(base, two, replicas=2)


CHECKS: tuple[Callable[[ScriptTrials], None], ...] = (
    _plain,
    _transformer,
    _memory,
    _data_parallel,
    _sharded,
    _pipeline,
    _tensor_parallel,
    _two_axes,
    _measured,
    _compressed,
    _experts,
    _compressed_model,
    _libraries,
)
"""One for each lab, in their order. Those with runs to compare begin with what the lab adds, in which a missing option
shows; lab 02 with the plain run."""


def judge_script(
    lab: str,
    path: Path,
    begin: Callable[[str], object] = lambda title: None,
    *,
    on: str = "local",
    machine: str | None = None,
    device: str = "cpu",
) -> Verdict:
    """Run a script as a lab asks for, and say what is right or wrong about it.

    Args:
        lab: two digits.
        begin: told the title of each run before it starts.
        on, machine, device: as for `dlojz.run`; jobs of a cluster write beside the runs, where every node reads.

    Raises:
        LabError: if the lab adds nothing to the script, there is no such file, or the runs are refused.
    """
    check = CHECKS[number_of_lab(lab)]
    if not path.is_file():
        raise TEXTS.refusal("script", "no file", path=path, lab=lab)
    shared = runs_root() if on == "slurm" else None
    if shared is not None:
        shared.mkdir(parents=True, exist_ok=True)
    placement = {"on": on, "machine": machine, "device": device}
    with tempfile.TemporaryDirectory(prefix=".dlojz-script-", dir=shared) as folder:
        trials = ScriptTrials(path.absolute(), Path(folder), begin, placement)
        try:
            check(trials)
            for trial in trials.done:
                _check_printed(trial)
        except Wrong as wrong:
            return Verdict("wrong", str(wrong))
        except LibraryMissing as missing:
            return Verdict("note", str(missing))
        # The most that a rank held in any run: all parameters, as some run of each lab shares none.
        total_elements = max(rank.held for trial in trials.done for rank in trial.ranks)
        rows = [_row(trial, total_elements) for trial in trials.done]
        return Verdict("right", "\n".join([_praise(lab), *rows, *trials.not_judged]))


def judge_in_notebook(lab: Lab, script: str | Path, **placement: Any) -> None:
    """Judge a student's script as the open lab asks for, show the verdict, and remember a right one.

    A script never costs the notebook its kernel: it runs in separate processes.

    Args:
        lab: the one that is open.
        script: path of the script, from the notebook's folder or from one above it, where a terminal starts.
        placement: `on`, `machine` and `device`, as for `dlojz.run`.
    """
    script_path, cwd = Path(script).expanduser(), Path.cwd()
    path = next(
        (candidate for folder in (cwd, *cwd.parents[:LEVELS]) if (candidate := folder / script_path).exists()),
        script_path,
    )
    if not path.exists():
        folder = shlex.quote(str(path.parent))
        show(
            Verdict(
                "todo",
                str(
                    TEXTS.sentence("judge", "the script is not there yet", path=path, number=lab.number, folder=folder)
                ),
            )
        )
        return
    try:
        print(path.resolve(), flush=True)
        verdict = judge_script(lab.number, path, lambda title: print(f"… {title}", flush=True), **placement)
    except LabError as error:
        verdict = Verdict("wrong", str(error))
    show(verdict)
    if verdict.state == "right":
        lab.remember(SCRIPT)


def _praise(lab: str) -> str:
    return TEXTS.say("judge", "right", lab=lab)


def _beside_prediction(trial: Trial) -> Said | str:
    """How the bytes of a run compare with those predicted for such a model; nothing where one side is not known."""
    row = compare(trial.record).rows[0] if trial.sent_bytes else None
    if row is None or row.exact is None:
        return ""
    if row.exact:
        return Said(", as predicted", ", comme prédit")
    predicted_bytes = sum(pair.message_bytes.predicted or 0 for pair in row.communication)
    if predicted_bytes == trial.sent_bytes:
        return TEXTS.sentence("judge", "other messages than predicted")
    told = format_bytes(predicted_bytes)
    return Said(f" ({told} predicted for such a model)", f" (prédit pour un tel modèle : {told})")


def _row(trial: Trial, total_elements: int) -> str:
    """One run in a line: its losses, what a rank holds and sends, and whether that was predicted."""
    losses, rank = trial.record.losses, trial.ranks[0]
    predicted = _beside_prediction(trial)
    sent_text = say(
        en=f"; {format_bytes(trial.sent_bytes)} sent per step{predicted}",
        fr=f" ; {format_bytes(trial.sent_bytes)} envoyés par pas{predicted}",
    )
    return say(
        en=f"{trial.title}: loss {significant(losses[0], 4)} → {significant(losses[-1], 4)} in {len(losses)} steps; "
        f"{percent(rank.held / total_elements)} of the parameters on rank 0{sent_text if trial.sent_bytes else ''}",
        fr=f"{trial.title} : perte {significant(losses[0], 4)} → {significant(losses[-1], 4)} en {len(losses)} pas ; "
        f"{percent(rank.held / total_elements)} des paramètres sur le rang 0{sent_text if trial.sent_bytes else ''}",
    )
