"""Command line of the course, `python -m dlojz.train`, as one writes it after `srun`.

    srun python -m dlojz.train -b 28 -s 200 --image-size 288 --deepspeed --deepspeed_config ds_config_zero2.json

Every process reads the same words and finds the same configuration. The first one alone makes the run folder, prints,
and writes the record, so that `dlojz runs` and `dlojz compare` find the run as any other; no other process goes on
before it knows of the folder, or of why there is none.
"""

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from dlojz.base.errors import LabError
from dlojz.base.language import decimal, format_bytes, say
from dlojz.cli.main import DONE, FAILED, REFUSED
from dlojz.cli.options import (
    HELP_WORDS,
    Flag,
    Given,
    config_flags,
    flags,
    help_texts,
    parse,
    phrase,
    shared_flags,
    show_help,
    tell,
)
from dlojz.config.deepspeed_json import json_left_to_the_lab, read_deepspeed_json
from dlojz.config.layout import Layout
from dlojz.config.run_config import RunConfig
from dlojz.data import check_available
from dlojz.results.record import RunRecord, write_record
from dlojz.runnable import check_runnable
from dlojz.running.state import RECORD, read_all_events, rebuild
from dlojz.running.store import claim, runs_root

PROGRAM = "python -m dlojz.train"
_SPELLINGS = {
    "micro_batch": ("-b", "--batch-size"),
    "steps": ("-s", "--steps"),
    "micro_batches": ("--accumulation",),
    "learning_rate": ("--lr", "--learning-rate"),
    "weight_decay": ("--wd", "--weight-decay"),
}
"""Fields that the course writes otherwise than `dlojz run`."""
_FIELDS = (
    *("model", "image_size", "sequence_length", "data", "data_root", "seed", "device", "zero", "engine", "precision"),
    *("checkpointing", "offload", "optimizer", "schedule", "chunks", "partition", *_SPELLINGS),
)
OPTIONS: tuple[Flag, ...] = (
    *(replace(flag, spellings=_SPELLINGS.get(flag.name, flag.spellings)) for flag in config_flags(*_FIELDS)),
    *flags(help_texts("course")[PROGRAM].options),
    *shared_flags()["root"],
)
_DEEPSPEEDS_OWN = ("zero", "engine", "offload")


def configure(args: Given, processes: int) -> tuple[RunConfig, tuple[str, ...]]:
    """Configure the run that the options ask for, on so many processes.

    Returns:
        the run, and the keys of DeepSpeed's JSON file that the lab sets by itself.

    Raises:
        LabError: if options, JSON file and processes do not fit together.
    """
    stages = args["pipeline_parallel_size"]
    if processes % stages:
        raise phrase.refused("stages do not divide processes", stages=stages, processes=processes)
    # Only fields that the words give: all else may come from the JSON file.
    fields: dict[str, Any] = {name: args[name] for name in _FIELDS if name in args}
    fields |= {"dp": processes // stages, "pp": stages}
    path = args["deepspeed_config"]
    if path is None:
        if args["deepspeed"]:
            raise phrase.refused("DeepSpeed without its file")
        return RunConfig.of(**fields), ()
    for name in _DEEPSPEEDS_OWN:
        # These two do not contradict the file: it is DeepSpeed's, and it says nothing of `offload=activations`.
        if name in fields and fields[name] not in ("deepspeed", "activations"):
            raise phrase.refused("said beside the file of DeepSpeed", name=name, fields=fields[name])
    # A run of DeepSpeed first: the file's keys are read into its fields.
    base = RunConfig.of(**{**fields, "engine": "deepspeed"})
    config = read_deepspeed_json(path, base)
    _check_agreement(fields, base, config)
    return config, json_left_to_the_lab(path)


def _check_agreement(names: Iterable[str], base: RunConfig, config: RunConfig) -> None:
    """Refuse a field that the command line and the JSON file set to different values."""
    for name in names:
        value, json = (getattr(run.layout if name in Layout.model_fields else run, name) for run in (base, config))
        if json != value:
            raise phrase.refused("another value in the file of DeepSpeed", name=name, value=value, json=json)


_KEY, _READ = "dlojz/run_folder", "dlojz/read"
_MEETING = timedelta(minutes=5)


class LaunchedRank(NamedTuple):
    """This process among all of its launcher: `srun`, `torchrun`, `deepspeed`, or none."""

    rank: int
    size: int


def place_of_this_process() -> LaunchedRank:
    """Find rank and number of processes, as `idr_torch` reads them from the launcher's variables."""
    environment = os.environ
    by_variables = "RANK" in environment and "WORLD_SIZE" in environment
    if by_variables and ("TORCHELASTIC_RUN_ID" in environment or "SLURM_STEP_ID" not in environment):
        # What torchrun or deepspeed has started within a SLURM step has its own ranks; and idr_torch knows the two
        # by a variable that only torchrun sets.
        environment.setdefault("TORCHELASTIC_RUN_ID", "deepspeed")
        environment.setdefault("LOCAL_WORLD_SIZE", environment["WORLD_SIZE"])
        environment.pop("SLURM_STEP_ID", None)
    warnings.filterwarnings("ignore", message="Calling idr_torch")  # alone is a legal number of processes
    import idr_torch

    return LaunchedRank(int(idr_torch.rank), int(idr_torch.size))


def agree(process: LaunchedRank, make: Callable[[], Path]) -> Path:
    """Agree on one run folder among all processes.

    Args:
        make: makes the folder; called by the first process only.

    Raises:
        LabError: of `make`, on every process; or if the first process cannot be reached.
    """
    if process.size == 1:
        return make()
    store = _store(process)
    if process.rank > 0:
        # Who: the first process, to each other one. What: a path, or an empty text. How much: under 4 kB.
        answer = bytes(store.get(_KEY)).decode()
        store.add(_READ, 1)
        if not answer:
            raise LabError("the first process has refused the run; its own message says why.")
        return Path(answer)
    folder: Path | None = None
    try:
        folder = make()
        return folder
    finally:
        store.set(_KEY, str(folder or ""))
        deadline_s = time.monotonic() + _MEETING.total_seconds()
        while store.add(_READ, 0) < process.size - 1 and time.monotonic() < deadline_s:
            time.sleep(0.02)  # the store ends with this process's hold on it


def _store(process: LaunchedRank) -> Any:
    """Open the store of all processes: torchrun's own, or one of the first process at the launcher's port."""
    from torch._C._distributed_c10d import TCPStore  # which torch.distributed gives out under the same name

    try:
        has_agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            world_size=process.size,
            is_master=process.rank == 0 and not has_agent_store,
            timeout=_MEETING,
            wait_for_workers=False,
        )
    except (RuntimeError, KeyError) as error:
        reason = str(error).splitlines()[0][:200]
        raise LabError(
            f"process {process.rank} of {process.size} cannot reach the first one at "
            f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}: {reason}"
        ) from None


_SHOWN_LOSSES = 10
_OTHERS_S = 30.0
"""Seconds for which the first process waits for the others' last words."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train in this process, which the launcher has started once for each rank.

    Args:
        argv: words of the command line; by default those of this process.

    Returns:
        The exit code: 0 completed or diverged, 1 ended otherwise, 2 refused.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    process = place_of_this_process()
    if HELP_WORDS & set(words):
        if process.rank == 0:
            show_help(PROGRAM, OPTIONS, help_texts("course")[PROGRAM])
        return DONE
    try:
        args = parse(PROGRAM, OPTIONS, words)
        config, notes = configure(args, process.size)
        check_runnable(config)
        check_available(config.data_name, config.data_root, global_batch=config.layout.global_batch)
        folder = agree(process, lambda: claim(config, runs_root(args["root"]), force_new=True)[0])
    except LabError as error:
        if process.rank == 0:
            tell(f"dlojz.train: {error}")
        return REFUSED
    if process.rank == 0:
        _announce(config, notes)
    # The ranks meet again in the run folder, which all of them see: a port that was theirs may be taken by now.
    os.environ.pop("MASTER_ADDR", None)
    from dlojz.running.worker import main as work

    code = work(folder)
    return _report(folder, process) if process.rank == 0 else code


def _announce(config: RunConfig, notes: Sequence[str]) -> None:
    layout = config.layout
    tell(phrase("training announced", config=config, layout=layout))
    if notes:
        tell(phrase("set by the lab itself", notes=", ".join(notes)))


def _report(folder: Path, process: LaunchedRank) -> int:
    """Write the record, and report it."""
    deadline_s = time.monotonic() + _OTHERS_S
    while time.monotonic() < deadline_s:
        ended = [rank for rank, events in read_all_events(folder).items() if any(e["event"] == "end" for e in events)]
        if len(ended) == process.size:
            break
        time.sleep(0.1)
    record = rebuild(folder)
    write_record(folder / RECORD, record)
    for line in _lines(record):
        print(line)
    print(say(en=f"kept in {folder}", fr=f"gardé dans {folder}"))
    sys.stdout.flush()
    if record.status in ("completed", "diverged"):
        return DONE
    tell(f"dlojz.train: {record.status}: {record.reason}")
    return FAILED


def _lines(record: RunRecord) -> Iterator[str]:
    """Report losses, throughput and memory of the first rank, a line each."""
    losses = record.losses
    interval = max(1, len(losses) // _SHOWN_LOSSES)
    step = say(en="step", fr="pas")
    for number, loss in enumerate(losses):
        if number % interval == 0 or number == len(losses) - 1:
            yield f"{step} {number}: {say(en='loss', fr='perte')} {decimal(loss, 4)}"
    footprint = record.footprints[0] if record.footprints else None
    if footprint is not None and footprint.samples_per_s:
        step_s = footprint.phases.step_s or 0.0
        yield phrase("throughput", footprint=footprint, step_s=step_s)
    else:
        yield phrase("throughput not measured")
    if footprint is not None and footprint.memory.peak_bytes:
        peak = format_bytes(footprint.memory.peak_bytes)
        yield say(en=f"peak memory of rank 0: {peak}", fr=f"pic mémoire du rang 0 : {peak}")


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # a rank whose peers are gone must not wait for them in an exit handler
