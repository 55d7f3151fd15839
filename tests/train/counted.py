"""What several tests of training share: runs made whole and cut off, and what is then held against what was predicted.

Tests import it as `tests.train.counted`, and so may what a test module prepares. pytest does not tell the values of an
assertion that stands outside a test module: those here name theirs.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dlojz import predict
from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.config.run_config import RunConfig
from dlojz.prediction.compute import checkpoint_bytes
from dlojz.results.footprint import STATES, Footprint
from dlojz.results.record import read_events
from dlojz.runnable import check_runnable
from dlojz.train.checkpoint_files import listing, verify
from dlojz.train.checkpoint_tensors import CheckpointTensors
from tests.train.matrix import do_in_forks
from tests.train.resuming import do_all

Fields = dict[str, Any]
"""What a configuration is made of, by `RunConfig.of`."""
GLOO_THREADS = 2
"""Of each process group: each may hold the message that it has reduced for a moment after the call has returned, until
it runs again and takes the next one. On a busy machine that moment lasts, and the message is still counted. Source:
torch 2.13, `csrc/distributed/c10d/ProcessGroupGloo.cpp`, `runLoop` and `Options::threads`."""
Job = dict[str, Any]
"""What `resuming.py` does in one go: see there."""


class Runs:
    """Folders of runs, and the jobs that make them: all of one number of ranks in one process."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def prepare(self, name: str, config: RunConfig) -> str:
        folder = self.root / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(config.to_json())
        return str(folder)

    def do(self, jobs: list[Job], processes: int) -> None:
        listed = self.root / f"jobs-{processes}-{len(jobs)}-{len(list(self.root.iterdir()))}.json"
        listed.write_text(json.dumps(jobs))
        folders = [Path(job.get("train") or job["to"]) for job in jobs]
        configs = [RunConfig.from_json((folder / "config.json").read_text()) for folder in folders]
        do_in_forks(do_all, listed, processes, configs)

    def told(self, name: str, event: str, key: str, rank: int = 0) -> list[Any]:
        found = read_events(self.root / name / "events" / f"rank-{rank}.jsonl")
        return [one[key] for one in found if one["event"] == event]


def deal(
    made: Runs, runs: Mapping[str, Fields], cut: Mapping[str, int], left: Mapping[str, int] | None = None
) -> dict[int, list[Job]]:
    """The jobs of each number of processes that make the runs `whole/NAME`, and again, cut off, as `cut/NAME`.

    Args:
        made: where the runs are prepared.
        runs: the fields of each, by name.
        cut: after which step one is cut off, and then gone on with.
        left: after which step one is cut off, and left so.
    """
    jobs: dict[int, list[Job]] = {}
    stops = {**cut, **(left or {})}
    for name, fields in runs.items():
        config = RunConfig.of(**fields)
        own = jobs.setdefault(config.layout.world_size, [])
        own.append({"train": made.prepare(f"whole/{name}", config)})
        if name in stops:
            folder = made.prepare(f"cut/{name}", config)
            own.append({"train": folder, "stop_after": stops[name]})
            own += [{"train": folder}] if name in cut else []
    return jobs


def prepare_runs(
    folder: Path, runs: Mapping[str, Fields], cut: Mapping[str, int], left: Mapping[str, int] | None = None
) -> Runs:
    """Makes the runs that `deal` deals out, under a folder."""
    made = Runs(folder)
    for processes, jobs in deal(made, runs, cut, left).items():
        made.do(jobs, processes)
    return made


def going_on_from(made: Runs, origin: str, name: str, config: RunConfig) -> Job:
    """The job of a new run that goes on, as its own configuration says, from what another has kept."""
    folder = made.prepare(name, config)
    shutil.copytree(made.root / origin / "checkpoints", Path(folder) / "checkpoints")
    return {"train": folder}


def footprint(runs: Runs, name: str, rank: int = 0) -> Footprint:
    """What a rank of a whole run has counted."""
    return Footprint.from_dict(runs.told(f"whole/{name}", "footprint", "footprint", rank)[-1])


def check_as_predicted(
    runs: Runs,
    name: str,
    config: RunConfig,
    peak: float | None = 0.02,
    step_flops: float | None = None,
    held_group: str = "",
) -> None:
    """On every rank of a whole run: states by category and every collective exactly, the peak to a relative tolerance.

    `peak` and `step_flops` are the relative tolerances of the peak and of a step's FLOPs; None: not looked at. A thread
    of gloo may still hold a message of the group `held_group` at the peak: so much more may be counted.
    """
    for rank in range(config.layout.world_size):
        counted, predicted = footprint(runs, name, rank), predict(config, rank)
        for category in STATES:
            found, expected = counted.memory.category(category), predicted.memory.category(category)
            assert found == expected, (rank, category, found, expected)
        found, expected = counted.communication, predicted.communication
        assert found == expected, (rank, found, expected)
        found, expected = counted.memory.peak_bytes, predicted.memory.peak_bytes
        if peak is not None:
            messages = [one.message_bytes / one.count for one in predicted.communication if one.group == held_group]
            held = max(messages, default=0)
            assert found - held <= expected / (1 - peak), (rank, found, expected)
            assert found >= expected / (1 + peak), (rank, found, expected)
        if step_flops is not None:
            found, expected = counted.step_flops, predicted.step_flops
            assert expected == pytest.approx(found, rel=step_flops), (rank, found, expected)


def check_goes_on(runs: Runs, name: str, step: int) -> None:
    """A run that was cut off went on with this step, and ended bit for bit as the whole one: losses and weights."""
    failed, resumed = (
        runs.told(f"cut/{name}", *told) for told in (("checkpoint_failed", "reason"), ("resumed", "step"))
    )
    assert failed == [], failed
    assert resumed == [step], resumed
    for event, key in (("step", "loss"), ("weights", "sha256")):
        whole, cut = (runs.told(f"{kind}/{name}", event, key) for kind in ("whole", "cut"))
        assert cut == whole, (key, cut, whole)


def kept(runs: Runs, name: str) -> tuple[RunConfig, int]:
    """Whose the only checkpoint of a run that was cut off is, and the bytes of its tensors: each is read."""
    [one] = listing(runs.root / "cut" / name)
    manifest = verify(one.folder)
    with CheckpointTensors(one.folder, manifest) as source:
        tensors = [source.tensor(tensor) for tensor in manifest.tensors]
    return manifest.config, sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def check_checkpoint_bytes(runs: Runs, name: str) -> None:
    """The only checkpoint of a run that was cut off has exactly the bytes predicted."""
    config, found = kept(runs, name)
    assert found == checkpoint_bytes(config), (found, checkpoint_bytes(config))


def check_refused(fields: Fields, english: str, french: str, to_run: bool = False) -> None:
    """A configuration is refused in one sentence, of which a part (a pattern) is given in each language.

    `to_run`: refused when it is to be run, if not before.
    """
    for language, sentence in (("en", english), ("fr", french)):
        use_language(language)
        try:
            with pytest.raises(LabError, match=sentence) as refused:
                config = RunConfig.of(**fields)
                if to_run:
                    check_runnable(config)
        finally:
            use_language("en")
        assert str(refused.value).count(". ") == 0, str(refused.value)
