"""Compare processes of one script: what each rank read, averaged and holds, and where one process does otherwise.

`rank_observer.py` writes a report on each rank: samples, gradients, weights, wrappers. The labs' judge asks for layouts
by the options of its script; `parity` takes any script: the ranks' batches, joined, are what one process of the same
script then reads. A cause is named where the reports show it; otherwise the sentence says what differs.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from dlojz.base.language import Said, Sentences, Wrong, integer, say, significant
from dlojz.base.table import Table
from dlojz.config.run_config import Observation
from dlojz.results.record import RunRecord

COMPARED_STEPS = 10
"""Steps that are compared: later, rounding has grown."""
OBSERVED = "observed"
"""Folder of the reports, in that of the run."""


@dataclass(frozen=True)
class RankReport:
    """What one rank did.

    Attributes:
        steps, repeated: of its optimizers, and those with gradients that a step had used already.
        kept: steps whose gradients were still there when those of the next one came.
        group_size: ranks of the process group at the first step; 0 where there is none.
        shuffled, unshuffled: passes over a loader whose sampler shuffles, and does not.
        set_epochs: calls of `set_epoch`.
        epochs: digests of the samples that each pass over a DataLoader yielded, in their order.
        saved: files that torch.save wrote.
        ddp, fsdp_units: modules that DistributedDataParallel wraps, and that `fully_shard` was called on.
        late_shards: calls of `fully_shard` on a module of one that was sharded already.
        ddp_nested, ddp_ranks: those within another one, and the ranks of its group.
        ddp_calls, ddp_synced: forward passes of DistributedDataParallel, and those after which it averages.
        blocks: how often the block occurs that is repeated most.
        stale: parameters of its optimizer that no module has.
        schedule, micro_batches: class of torch's pipeline schedule, empty where there is none, and what it cuts.
        held, plain: elements of its parameters on this rank, and of those that are no DTensors.
        mesh_axes: axes of the largest mesh that a parameter lies on.
        mesh_row: its place along the first axis of such a mesh.
        by_columns, by_rows: matrices that are split along dim 0 of their weight, and along dim 1.
        begun_with: sum of squares of each parameter before the first step.
        gradients: sum of squares of the gradient of each parameter, at the first step.
        moments: whether its optimizer had any before that step.
        weights: digest of what is held, at the end.
        fused: whether its optimizer updates in one kernel.
        levels: different values of the matrices that the first products used.
        uses: calls of the module with parameters that the first step calls most often, recomputation included.
        matrices, zeros: elements of its matrices at the end, and how many of them are zero.
        library: class of the library that trains, empty where there is none.
        pipeline_ranks: ranks of its pipeline; 0 without one.
        optimizers, learning_rates: how many there are, and the rates of the first one.
        batches: by loader, in the order in which they are read: samples of its data set (`size`), batches of a pass
            (`length`), samples of a batch (`batch`), replicas that its sampler counts (0: unknown), indices of each
            batch of each pass, and the places of the passes in `epochs`.
        samples: digests of the samples that the model is called with, in each of the first steps.
        inputs: digests of the entries of each tensor that it is called with, in the first step.
        backwards, calls, synced: backward passes of the first step, calls of models, and those whose gradients DDP
            averages.
        local_gradients, used_gradients: projections of the gradient of each parameter at the first step: of what
            backward has brought on this rank, and of what the optimizer uses; empty where parameters are parts.
        clipped: norms at which the gradients of the first step were clipped.
        after: projections of each parameter after the last step that is compared.
        dropouts, batch_norms: layers in the first step that draw random numbers, or average over this rank's samples.
    """

    rank: int
    steps: int
    repeated: int
    kept: int
    group_size: int
    shuffled: int
    unshuffled: int
    set_epochs: int
    epochs: tuple[tuple[str, ...], ...]
    saved: tuple[str, ...]
    ddp: int
    ddp_nested: int
    ddp_ranks: int
    ddp_calls: int
    ddp_synced: int
    fsdp_units: int
    late_shards: int
    blocks: int
    stale: int
    schedule: str
    micro_batches: int
    held: int
    plain: int
    mesh_axes: int
    mesh_row: int
    by_columns: int
    by_rows: int
    begun_with: tuple[float, ...]
    gradients: tuple[float, ...]
    moments: int
    weights: str
    fused: int
    levels: tuple[int, ...]
    matrices: int
    zeros: int
    uses: int
    library: str
    pipeline_ranks: int
    optimizers: int
    learning_rates: tuple[float, ...]
    batches: tuple[dict[str, Any], ...]
    samples: tuple[list[str], ...]
    inputs: tuple[str, ...]
    backwards: int
    calls: int
    synced: int
    local_gradients: tuple[list[float], ...]
    used_gradients: tuple[list[float], ...]
    clipped: tuple[float, ...]
    after: tuple[list[float], ...]
    dropouts: int
    batch_norms: int

    @property
    def trained_loader(self) -> dict[str, Any] | None:
        """The loader of the samples that the model is trained with; None where that cannot be seen."""
        trained = set(self.inputs)
        shared = [
            (len(trained.intersection(itertools.chain.from_iterable(self._epochs(loader)))), loader)
            for loader in self.batches
        ]
        count, loader = max(shared, key=lambda pair: pair[0], default=(0, None))
        return loader if count or len(shared) == 1 else None

    def _epochs(self, loader: dict[str, Any]) -> list[tuple[str, ...]]:
        return [self.epochs[number] for number in loader["epochs"] if number < len(self.epochs)]

    @property
    def passes(self) -> Sequence[tuple[str, ...]]:
        """Digests of each pass over that loader, or of the first step, where there is none."""
        if self.trained_loader is not None:
            return self._epochs(self.trained_loader)
        if not self.batches and any(self.epochs):
            return self.epochs
        return [tuple(self.samples[0])] if self.samples else []


@dataclass(frozen=True)
class Trial:
    """One run of a script, with the reports of its ranks.

    Attributes:
        words: options of the script that were given besides the common ones.
        rates: by rank, the numbers that it printed after `samples/s`.
        printed: by rank, the numbers that it printed after `loss`.
    """

    words: tuple[str, ...]
    record: RunRecord
    ranks: tuple[RankReport, ...]
    folder: Path | None = None
    rates: tuple[tuple[float, ...], ...] = ()
    printed: tuple[tuple[float, ...], ...] = ()

    @property
    def title(self) -> str:
        """The run in words: its processes and options."""
        return title_of(len(self.ranks), self.words)

    @property
    def sent_bytes(self) -> int:
        """Bytes of the messages of a step, of all collectives of rank 0."""
        footprint = self.record.footprint()
        return sum(traffic.message_bytes for traffic in footprint.communication) if footprint is not None else 0

    @property
    def activations_bytes(self) -> int:
        """Bytes that forward keeps, of rank 0."""
        footprint = self.record.footprint()
        return (footprint.memory.activations_bytes or 0) if footprint is not None else 0


def title_of(processes: int, words: Sequence[str]) -> str:
    """Name a run by its processes and options."""
    short_words = [Path(word).name if Path(word).is_absolute() else word for word in words]
    options = f", {' '.join(short_words)}" if words else ""
    return say(en=f"{processes} process{'es' if processes > 1 else ''}{options}", fr=f"{processes} processus{options}")


def rank_reports(folder: Path, processes: int) -> tuple[RankReport, ...]:
    """Read what the ranks wrote; what has not got so far is left out."""
    reports = []
    for rank in range(processes):
        path = folder / OBSERVED / f"rank-{rank}.json"
        if path.is_file():
            content = json.loads(path.read_text(encoding="utf-8"))
            content = {field.name: content[field.name] for field in fields(RankReport) if field.name != "rank"}
            content = {name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}
            reports.append(RankReport(rank=rank, **content | {"epochs": tuple(map(tuple, content["epochs"]))}))
    return tuple(reports)


TEXTS = Sentences(Path(__file__).parent / "data" / "script_parity.md")

SAME_LOSS = 1e-3
"""Relative distance of losses that differ by the order of additions alone."""
SAME_GRADIENTS = 0.02
"""The same of the norm of gradients."""
SAME_ON_ONE = 1e-5
"""The same, where a script runs twice on one process."""
SHARED_SAMPLES = 0.1
"""Share of a rank's samples that others read, from which on it is no chance: images may be there twice."""

DIVIDED = TEXTS.sentence("gradients", "not averaged, or only added")
CLIPPED = TEXTS.sentence("gradients", "clipped")
NOT_DIVIDED = TEXTS.sentence("gradients", "no whole factor")


def check_steps(title: str, ranks: Sequence[RankReport]) -> None:
    """Refuse steps that not all ranks make, or that use gradients of a step before."""
    idle = [report.rank for report in ranks if report.steps == 0]
    if idle and len(idle) < len(ranks):
        raise TEXTS.wrong("steps", "a rank without steps", title=title, rank=idle[0])
    for fault in ("repeated", "kept", "stale"):
        if any(getattr(report, fault) for report in ranks):
            raise TEXTS.wrong("steps", fault, title=title)


def differing_step(reference: Sequence[float], second: Sequence[float], tolerance: float) -> int | None:
    """Find the first step whose losses differ; None where all are the same."""
    # strict=False: of runs of different length, the steps that both have.
    pairs = zip(reference, second, strict=False)
    return next((step for step, (a, b) in enumerate(pairs) if not math.isclose(a, b, rel_tol=tolerance)), None)


def check_losses(base: Trial, peer: Trial, tolerance: float, cause: Said, *, steps: int | None = None) -> None:
    """Refuse a run whose losses are not those of another one; the sentence ends with a likely cause."""
    step = differing_step(base.record.losses[:steps], peer.record.losses[:steps], tolerance)
    if step is not None:
        first, second = (significant(trial.record.losses[step], 5) for trial in (base, peer))
        titles = {"base": base.title, "peer": peer.title}
        raise TEXTS.wrong("losses", "differ", step=step + 1, first=first, second=second, cause=cause, **titles)


def check_group(trial: Trial) -> None:
    """Refuse processes of which each trains alone."""
    if any(rank.group_size != len(trial.ranks) for rank in trial.ranks):
        raise TEXTS.wrong("steps", "no process group", title=trial.title)


def check_shares(many: Trial, replicas: int) -> None:
    """Refuse replicas that read the same samples, or ranks of one replica that do not."""
    # Ranks that share a replica read the same samples, so there is one set for each replica.
    shares = {frozenset(rank.passes[0]) for rank in many.ranks if rank.passes and rank.passes[0]}
    if len(shares) > replicas:
        several = TEXTS.sentence("samples", "replicas", replicas=replicas)
        count = several if replicas > 1 else TEXTS.sentence("samples", "one replica")
        raise TEXTS.wrong("samples", "more shares", title=many.title, shares=len(shares), replicas=count)
    # What a script draws from a small data set by itself may be the same by chance.
    pairs = itertools.combinations(shares if any(rank.epochs for rank in many.ranks) else (), 2)
    if 0 < len(shares) < replicas or any(len(a & b) > SHARED_SAMPLES * len(a) for a, b in pairs):
        has_loader = any(rank.batches for rank in many.ranks)
        remedy = TEXTS.sentence("samples", "no distributed sampler" if has_loader else "drawn by the script")
        raise TEXTS.wrong("samples", "read by several replicas", title=many.title, remedy=remedy)


def check_orders(trial: Trial) -> None:
    """Refuse ranks that read each epoch in one order."""
    for rank, report in enumerate(trial.ranks):
        passes = report.passes
        # The second pass may have been cut off.
        if len(passes) > 1 and passes[1] and passes[0][: len(passes[1])] == passes[1]:
            raise TEXTS.wrong("orders", "same in both epochs", title=trial.title, rank=rank, cause=_same_order(report))


def _same_order(report: RankReport) -> Said:
    """Why a rank reads its samples in one order, as far as it was seen."""
    if report.unshuffled:
        return TEXTS.sentence("orders", "not shuffled, epochs set" if report.set_epochs else "not shuffled")
    return TEXTS.sentence("orders", "epochs set" if report.set_epochs else "epochs not set")


def check_saves(trial: Trial) -> None:
    """Refuse ranks that write the same file."""
    # Real paths: links and relative names of one file are the same here.
    writers = Counter(path for report in trial.ranks for path in set(report.saved))
    for path, count in writers.items():
        if count > 1:
            raise TEXTS.wrong("files", "written by several ranks", name=Path(path).name)


def check_trained_alike(base: Trial, many: Trial, *, are_same: bool, cause: Said = DIVIDED) -> None:
    """Refuse other losses and gradients than those of one process, with the cause where it is seen.

    Args:
        are_same: whether both read the same samples in the first step.
        cause: said of gradients that are too large or too small.
    """
    first_losses = [abs(loss) for trial in (base, many) for loss in trial.record.losses[:1]]
    times = max(first_losses) / min(first_losses) if first_losses and min(first_losses) > 0 else 1.0
    # A whole factor: a loss that is summed over ranks or micro-batches, or divided once too often.
    is_whole = round(times) > 1 and math.isclose(times, round(times), rel_tol=SAME_LOSS)
    first = DIVIDED if is_whole else _first_loss(base, many)
    check_losses(base, many, SAME_LOSS, first, steps=1)
    check_gradients(base, many, cause)
    check_losses(base, many, SAME_LOSS, TEXTS.sentence("losses", "same samples" if are_same else "other samples"))


def _first_loss(base: Trial, many: Trial) -> Said:
    """Why the first loss differs, as far as the weights before the first step tell."""
    begun = [rank.begun_with for rank in many.ranks]
    if any(rank.plain < rank.held for rank in many.ranks):  # shards: their squares say nothing of whole parameters
        return TEXTS.sentence("losses", "shards")
    baseline_squares = base.ranks[0].begun_with
    # As many parameters on each rank as on one process: copies; else parts, joined in the order of the ranks.
    copies = all(len(squares) == len(baseline_squares) for squares in begun)
    rank_squares = begun[0] if copies else tuple(itertools.chain.from_iterable(begun))
    if _close(rank_squares, baseline_squares) and (
        not copies or all(_close(squares, baseline_squares) for squares in begun)
    ):
        return TEXTS.sentence("losses", "same weights")
    if not copies and _close(sorted(rank_squares), sorted(baseline_squares)):
        return TEXTS.sentence("losses", "weights in another order")
    return TEXTS.sentence("losses", "other weights")


def _close(values: Sequence[float], references: Sequence[float]) -> bool:
    return len(values) == len(references) and all(
        math.isclose(a, b, rel_tol=SAME_ON_ONE, abs_tol=1e-12) for a, b in zip(values, references, strict=True)
    )


def check_gradients(base: Trial, many: Trial, cause: Said = DIVIDED) -> None:
    """Refuse gradients of the first step that are not as large; Adam would hide it.

    On a mesh of two axes, some ranks hold the same parts and others do not: they are not compared.
    """
    if any(rank.mesh_axes > 1 for rank in many.ranks):
        return
    squares, baseline_squares = _gradients(many), _gradients(base)
    # Squares add up over parameters and parts; the ratio of the norms is the root of theirs.
    ratio = math.sqrt(squares / baseline_squares) if baseline_squares else 1.0
    if not math.isclose(ratio, 1.0, rel_tol=SAME_GRADIENTS):
        times = significant(ratio, 3)
        factor = max(ratio, 1 / ratio) if ratio else 0.0
        if cause is DIVIDED and math.isclose(squares, 1.0, rel_tol=SAME_GRADIENTS) and ratio < 1:
            cause = CLIPPED  # no other mistake leaves a norm of just 1
        elif cause is DIVIDED and not math.isclose(factor, round(factor), rel_tol=SAME_GRADIENTS):
            cause = NOT_DIVIDED
        raise TEXTS.wrong("gradients", "not as large", times=times, many=many.title, base=base.title, cause=cause)


def _gradients(trial: Trial) -> float:
    """Add up the squares of the gradients: once where all ranks hold the same, of each rank where they hold parts."""
    by_rank = [rank.gradients for rank in trial.ranks]
    # Other parameters on each rank: stages, whose squares are added.
    if len({len(rank_squares) for rank_squares in by_rank}) > 1:
        return math.fsum(itertools.chain.from_iterable(by_rank))
    # The same parameters: copies where the squares of all ranks agree, else parts.
    agreement = (
        math.isclose(min(squares), max(squares), rel_tol=SAME_ON_ONE) for squares in zip(*by_rank, strict=True)
    )
    return math.fsum(
        squares[0] if agrees else math.fsum(squares)
        for agrees, squares in zip(agreement, zip(*by_rank, strict=True), strict=True)
    )


def check_averaged(many: Trial) -> None:
    """Refuse replicas that average no gradients."""
    report = many.ranks[0]
    if not many.sent_bytes:
        if not report.ddp:
            raise TEXTS.wrong("averages", "none", title=many.title)
        synced = "not through the output" if report.ddp_synced else "always under no_sync"
        raise TEXTS.wrong("averages", synced if report.ddp_calls else "inner model is called", title=many.title)
    if report.ddp and len({rank.weights for rank in many.ranks}) > 1:
        raise TEXTS.wrong("averages", "weights differ", title=many.title)


@dataclass(frozen=True)
class Averaged:
    """How the gradients that optimizers use at the first step come from those of the ranks' own samples.

    Attributes:
        is_local: whether each rank uses those of its own samples.
        times: factor between what is used and the mean of all ranks; None where it is no multiple of the mean.
        norms: at which each rank has clipped, where they differ: each has clipped its own.
    """

    is_local: bool
    times: float | None
    norms: tuple[float, ...] = ()


def averaged(many: Trial) -> Averaged | None:
    """Compare what optimizers use with the mean of the ranks' gradients; None where ranks hold parts.

    A projection of a mean is the mean of the projections, so no rank needs another's gradient.
    """
    local_vectors, used_vectors = (
        [list(itertools.chain.from_iterable(vectors)) for vectors in by_rank]
        for by_rank in ([rank.local_gradients for rank in many.ranks], [rank.used_gradients for rank in many.ranks])
    )
    if len({len(vector) for vector in local_vectors}) != 1 or not local_vectors[0]:
        return None
    mean = [math.fsum(values) / len(values) for values in zip(*local_vectors, strict=True)]
    square = math.fsum(value * value for value in mean)
    if not square or not math.isfinite(square):
        return None
    clipped = tuple(rank.clipped[0] for rank in many.ranks if rank.clipped)
    norms = clipped if clipped and max(clipped) > (1 + SAME_LOSS) * min(clipped) else ()
    is_local = all(map(_near, used_vectors, local_vectors)) and not all(_near(mean, part) for part in local_vectors)
    # The factor of least squares; the rest must be small.
    times = math.fsum(map(math.prod, zip(used_vectors[0], mean, strict=True))) / square
    is_multiple = all(_near([times * value for value in mean], used) for used in used_vectors)
    return Averaged(is_local, times if is_multiple else None, norms)


def _near(values: Sequence[float], references: Sequence[float]) -> bool:
    """Whether two vectors are the same up to the rounding of messages in bf16."""
    return math.dist(values, references) <= SAME_GRADIENTS * math.hypot(*references)


def _cause_of(mean: Averaged | None, processes: int) -> Said | None:
    """Name why gradients are not the mean of the ranks; None where they are, or where that was not seen."""
    if mean is None:
        return None
    if mean.norms:
        norms = ", ".join(significant(norm) for norm in mean.norms)
        return TEXTS.sentence("gradients", "clipped on each rank", norms=norms)
    if mean.times is not None and math.isclose(mean.times, processes, rel_tol=SAME_GRADIENTS):
        return TEXTS.sentence("gradients", "added up", processes=processes)
    if mean.times is not None and math.isclose(mean.times, 1 / processes, rel_tol=SAME_GRADIENTS):
        return TEXTS.sentence("gradients", "divided again", processes=processes)
    if mean.times is None:
        return TEXTS.sentence("gradients", "no multiple of the mean")
    return None


def replicas_of(many: Trial, base: Trial | None) -> int | None:
    """Count the replicas of the model, as far as its wrappers and parameters show them; None where they do not."""
    ranks, first, processes = many.ranks, many.ranks[0], len(many.ranks)
    if first.pipeline_ranks:
        return processes // first.pipeline_ranks
    if first.mesh_axes > 1:  # replicas and shards, or shards and parts of layers
        return None
    if first.fsdp_units or first.library == "DeepSpeedEngine" or first.ddp_ranks == processes:
        return processes
    if any(rank.plain < rank.held for rank in ranks):  # DTensors that FSDP has not made: parts of layers
        return 1
    # As many parameters on each rank as on one process are copies; without that process, if they begin equal.
    if base is not None:
        return processes if all(rank.held == base.ranks[0].held for rank in ranks) else None
    return processes if all(_close(rank.begun_with, first.begun_with) for rank in ranks) else None


def check_begun(many: Trial) -> None:
    """Refuse copies of a model that begin with other weights on each rank."""
    if not all(_close(rank.begun_with, many.ranks[0].begun_with) for rank in many.ranks):
        raise TEXTS.wrong("weights", "differ at the beginning", title=many.title)


def _check_means(many: Trial, mean: Averaged | None) -> None:
    """Refuse replicas that step by gradients of their own samples, or that drift apart."""
    if mean is None or mean.is_local:
        check_averaged(many)
    if mean is not None and mean.is_local:
        raise TEXTS.wrong("averages", "of own samples alone", title=many.title)
    if len({rank.weights for rank in many.ranks}) > 1 and many.ranks[0].plain == many.ranks[0].held:
        raise TEXTS.wrong("weights", "differ at the end", title=many.title)


def _step_samples(trial: Trial, step: int = 0) -> list[str]:
    """Digests of all samples of a step, sorted; ranks that read the same are one replica."""
    shares = dict.fromkeys(tuple(rank.samples[step]) for rank in trial.ranks if step < len(rank.samples))
    return sorted(itertools.chain.from_iterable(shares))


def _per_pass(trial: Trial, replicas: int) -> int | None:
    """Samples that all replicas draw in one pass over the training's loader, by its own sampler."""
    loaders = [rank.trained_loader for rank in trial.ranks]
    sizes = [loader["length"] * loader["batch"] for loader in loaders if loader is not None]
    return sum(sizes) * replicas // len(sizes) if len(sizes) == len(loaders) and all(sizes) else None


def _check_coverage(base: Trial | None, many: Trial, replicas: int) -> None:
    """Refuse a pass over the data that reads samples on several replicas, or leaves some out."""
    loader = many.ranks[0].trained_loader
    if loader is not None and loader["replicas"] not in (0, replicas):
        counts = {"shared": loader["replicas"], "replicas": replicas}
        raise TEXTS.wrong("samples", "sampler of other replicas", title=many.title, **counts)
    alone, together = _per_pass(base, 1) if base is not None else None, _per_pass(many, replicas)
    if not alone or not together or loader is None or base is None:
        return
    # A last batch that is not full, of each replica, and of the one process.
    slack = replicas * loader["batch"] + (base.ranks[0].trained_loader or loader)["batch"]
    if abs(together - alone) > slack:
        key = "several replicas read the same" if together > alone else "missing"
        raise TEXTS.wrong("samples", key, title=many.title, together=integer(together), alone=integer(alone))


State = Literal["right", "wrong", "note"]


@dataclass(frozen=True)
class Parity:
    """One process beside several of a script: `right`, `wrong`, or `note` where that cannot be said, and a sentence.

    Attributes:
        base: the run on one process; None where there was none to compare with.
        are_same: whether both read the same samples in the first step.
        remarks: what is no mistake, and good to know.
    """

    state: State
    message: str
    many: Trial
    base: Trial | None
    are_same: bool
    remarks: tuple[str, ...] = ()

    def figures(self) -> dict[str, list[Any]]:
        """Figures that are compared, of one process and of several; None where there is none."""
        rows: dict[str, list[Any]] = {}
        for trial in (self.base, self.many):
            losses = trial.record.losses if trial is not None else ()
            rows.setdefault("samples", []).append(len(_step_samples(trial)) or None if trial else None)
            for step in range(min(3, len(self.many.record.losses))):
                rows.setdefault(f"loss {step + 1}", []).append(losses[step] if step < len(losses) else None)
            squares = _gradients(trial) if trial is not None and trial.ranks[0].gradients else None
            rows.setdefault("gradient norm", []).append(None if squares is None else math.sqrt(squares))
            rates = trial.ranks[0].learning_rates if trial is not None else ()
            rows.setdefault("learning rate", []).append(rates[0] if rates else None)
        rows["weights"] = [None, self.weights_apart()]
        return rows

    def weights_apart(self) -> float | None:
        """Distance of the weights after the steps that are compared, as a share of those of one process."""
        if self.base is None or not self.are_same:
            return None
        weights = [list(itertools.chain.from_iterable(trial.ranks[0].after)) for trial in (self.base, self.many)]
        is_whole = self.many.ranks[0].plain == self.base.ranks[0].held
        counts = {min(COMPARED_STEPS, len(trial.record.losses)) for trial in (self.base, self.many)}
        if len(counts) > 1 or not is_whole or not weights[0] or len(weights[0]) != len(weights[1]):
            return None
        return math.dist(*weights) / math.hypot(*weights[0])

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        runs = [trial.record.run_id if trial is not None else None for trial in (self.base, self.many)]
        answer = {"state": self.state, "message": self.message, "remarks": list(self.remarks), "runs": runs}
        return answer | {"same_samples": self.are_same, "figures": self.figures()}

    def table(self) -> Table:
        """Figures of both, with the verdict and the remarks below."""
        count = min(COMPARED_STEPS, len(self.many.record.losses))
        rows = []
        for name, pair in self.figures().items():
            kind, _, step = name.partition(" ") if name.startswith("loss") else (name, "", "")
            title = TEXTS.say("figures", kind, step=step, count=count)
            rows.append((title, *("—" if value is None else significant(value, 4) for value in pair)))
        head = ("", title_of(1, ()), title_of(len(self.many.ranks), ()))
        return Table(head, tuple(rows), notes=("", self.message, *self.remarks))


def parity(begin: Callable[[int, Observation], Trial], processes: int, most_steps: int) -> Parity:
    """Run a script on several processes and on one, on the same samples, and compare them.

    Args:
        begin: runs the script on so many processes, observed so, and raises `Wrong` where it does not come to its end.
        processes: at least 2.
        most_steps: optimizer steps after which both are ended.

    Raises:
        Wrong: if the script does not come to its end on these processes.
    """
    many = begin(processes, Observation(most_steps=most_steps))
    base, reason = None, ""
    try:
        _check_processes(many)
        batches_of = str(many.folder) if many.folder and any(rank.batches for rank in many.ranks) else ""
        try:
            base = begin(1, Observation(most_steps=most_steps, batches_of=batches_of))
            # One process makes a step of fewer samples: it accumulates as many more micro-batches.
            count, target = len(_step_samples(base)), len(_step_samples(many))
            if batches_of and count and count != target:
                observation = Observation(most_steps=most_steps, batches_of=batches_of, is_apart=True)
                base = begin(1, observation)
        except Wrong as wrong:
            reason = str(wrong)
        are_same = base is not None and _step_samples(base) == _step_samples(many) != []
        flaw, mean = _check_means_and_samples(many, base)
        excuse = _excuse(many, base, are_same, reason)
        state, message, remarks = _beside_one_process(many, base, excuse, flaw, mean)
    except Wrong as wrong:
        are_same = base is not None and _step_samples(base) == _step_samples(many) != []
        return Parity("wrong", str(wrong), many, base, are_same, tuple(map(str, _remarks(many, base))))
    remarks = [*remarks, *_remarks(many, base)]
    return Parity(state, message, many, base, are_same, tuple(map(str, remarks)))


def _check_processes(many: Trial) -> None:
    """Refuse what shows without a run on one process."""
    ranks = [
        # Another optimizer's backward pass may add to gradients; what is no parameter of a module may be trained.
        replace(rank, kept=rank.kept * (rank.optimizers == 1), stale=rank.stale * (rank.fsdp_units > 0))
        for rank in many.ranks
    ]
    check_steps(many.title, ranks)
    check_group(many)


def _check_means_and_samples(many: Trial, base: Trial | None) -> tuple[Said | None, Averaged | None]:
    """Refuse replicas that read the wrong samples or do not average; returns why gradients seem to be no mean.

    Beside it stands what is known of their mean: of ranks that hold parts of the parameters, nothing.
    """
    replicas, processes = replicas_of(many, base), len(many.ranks)
    is_partitioned = any(rank.library == "DeepSpeedEngine" or rank.plain < rank.held for rank in many.ranks)
    is_copied = replicas == processes and not is_partitioned
    if is_copied:
        check_begun(many)
    if replicas is not None:
        _check_coverage(base, many, replicas)
        # Ranks that share a replica may read its activations alone.
        if replicas == processes or all(rank.batches for rank in many.ranks):
            check_shares(many, replicas)
    if any(rank.shuffled and not rank.set_epochs for rank in many.ranks):
        check_orders(many)
    mean = averaged(many) if is_copied else None
    if is_copied:
        _check_means(many, mean)
    flaw = _cause_of(mean, processes)
    if flaw is not None and mean is not None and mean.norms:
        raise Wrong(f"{many.title}: {flaw.en}", f"{many.title} : {flaw.fr}")
    check_saves(many)
    return flaw, mean


def _beside_one_process(
    many: Trial, base: Trial | None, excuse: Said | None, flaw: Said | None, mean: Averaged | None
) -> tuple[State, str, list[Said | str]]:
    """Compare losses and gradients with those of one process, or say why that cannot be done."""
    if excuse is not None or base is None:
        losses = [trial.record.losses[:1] for trial in (base, many) if trial is not None]
        # Losses as large are divided by nothing more on several processes, so their gradients must be averaged.
        is_certain = base is not None and all(losses) and 2 / 3 < abs(losses[0][0] / (losses[-1][0] or 1.0)) < 3 / 2
        if flaw is not None and is_certain and mean is not None and mean.times is not None:
            raise Wrong(flaw.en, flaw.fr)
        seen = flaw or TEXTS.sentence("one process", "right without it")
        if mean is None:
            seen = TEXTS.sentence("one process", "parts of gradients")
        return "note", f"{excuse or ''} {seen}", []
    rates = [trial.ranks[0].learning_rates for trial in (base, many)]
    first_losses = [trial.record.losses[0] for trial in (base, many) if trial.record.losses]
    times = first_losses[0] / first_losses[-1] if first_losses and first_losses[-1] else 1.0
    remarks: list[Said | str] = []
    if round(times) > 1 and math.isclose(times, round(times), rel_tol=SAME_LOSS):
        check_gradients(base, many, flaw or TEXTS.sentence("gradients", "divided again", processes=round(times)))
        remarks.append(TEXTS.sentence("remarks", "losses to be added up", times=round(times)))
    elif not _close(*rates):
        check_gradients(base, many, flaw or DIVIDED)
        pair = [significant(by_group[0]) for by_group in rates]
        values = {"first": pair[0], "second": pair[1], "processes": len(many.ranks)}
        return "note", TEXTS.say("one process", "other learning rates", **values), []
    else:
        heads = [
            replace(trial, record=trial.record.model_copy(update={"losses": trial.record.losses[:COMPARED_STEPS]}))
            for trial in (base, many)
        ]
        check_trained_alike(*heads, are_same=True, cause=flaw or DIVIDED)
    count = min(COMPARED_STEPS, len(many.record.losses))
    joined = any(rank.batches for rank in many.ranks)
    way = TEXTS.sentence("one process", "batches joined" if joined else "drawn by each")
    return "right", TEXTS.say("one process", "same training", title=many.title, way=way, count=count), remarks


def _excuse(many: Trial, base: Trial | None, are_same: bool, reason: str) -> Said | None:
    """Say what keeps losses from being compared with those of one process, and what to do; None where nothing does."""
    if base is None:
        return TEXTS.sentence("one process", "no run", reason=reason)
    if not are_same:
        has_loader = any(rank.trained_loader for rank in many.ranks)
        return TEXTS.sentence("one process", "other samples at the first step" if has_loader else "other samples drawn")
    if many.ranks[0].dropouts:
        return TEXTS.sentence("one process", "dropout")
    if many.ranks[0].batch_norms:
        return TEXTS.sentence("one process", "batch norm")
    return None


def _remarks(many: Trial, base: Trial | None) -> list[Said]:
    """List what is no mistake of the processes, and good to know."""
    remarks, first, processes = [], many.ranks[0], len(many.ranks)
    loader, alone = first.trained_loader, base.ranks[0].trained_loader if base is not None else None
    if loader and alone and loader["batch"] and loader["batch"] == alone["batch"]:
        batches = {"alone": integer(loader["batch"]), "together": integer(processes * loader["batch"])}
        remarks.append(TEXTS.sentence("remarks", "batch grows", processes=processes, **batches))
    if first.ddp_nested:
        remarks.append(TEXTS.sentence("remarks", "wrapped twice"))
    if first.ddp and first.backwards > 1 and first.synced == first.calls:
        remarks.append(TEXTS.sentence("remarks", "averages after each pass", backwards=first.backwards))
    passes = first.passes
    if first.unshuffled and len(passes) > 1 and passes[1] and passes[0][: len(passes[1])] == passes[1]:
        remarks.append(TEXTS.sentence("remarks", "one order", cause=_same_order(first)))
    return remarks
