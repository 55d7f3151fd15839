"""A training that was cut off goes on as if it had not been: the same bits, and in another layout the same numbers."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from dlojz.base.machine import ignore_stop_signal
from dlojz.config.optimizers import OPTIMIZERS
from dlojz.config.run_config import RunConfig
from dlojz.prediction.compute import checkpoint_bytes
from dlojz.running.worker import STOPPED_IN_TIME, main
from dlojz.train import loop
from dlojz.train.checkpoint_files import listing, verify
from dlojz.train.checkpoint_tensors import CheckpointTensors
from tests.train.counted import Runs

LLAMA = {"model": "llama_tiny", "sequence_length": 16, "learning_rate": 0.01, "steps": 3, "device": "cpu"}
COATNET = {"model": "coatnet_tiny", "image_size": 32, "learning_rate": 0.01, "steps": 3, "device": "cpu"}
FOUR = {"micro_batch": 2, "micro_batches": 2}
TWO = {"micro_batch": 2, "dp": 2}
THREE = {"micro_batch": 1, "dp": 3}
HAND: dict[str, Any] = {"engine": "by_hand"}
DEEPSPEED: dict[str, Any] = {"engine": "deepspeed"}
RUNS: dict[str, dict[str, Any]] = {
    "one": {**LLAMA, **FOUR},
    "ddp-coatnet": {**COATNET, **TWO, "steps": 5},
    "zero2": {**LLAMA, **TWO, **HAND, "zero": 2},
    "zero3-bf16": {**LLAMA, **TWO, **HAND, "zero": 3, "precision": "bf16"},
    "fsdp2": {**LLAMA, **TWO, "zero": 3},
    "tp": {**COATNET, **FOUR, **HAND, "tp": 2},
    "tp-torch": {**LLAMA, **FOUR, "tp": 2},
    "pp": {**LLAMA, **FOUR, **HAND, "pp": 2},
    "pp-torch-momentum": {**LLAMA, **FOUR, "pp": 2, "optimizer": "momentum"},
    "pp-asynchronous": {**LLAMA, **FOUR, **HAND, "pp": 2, "schedule": "pipedream", "optimizer": "sgd"},
    "deepspeed-zero2-momentum": {**LLAMA, **TWO, **DEEPSPEED, "zero": 2, "optimizer": "momentum"},
    "deepspeed-zero3-bf16": {**LLAMA, **TWO, **DEEPSPEED, "zero": 3, "precision": "bf16"},
    "dp-tp": {**COATNET, **TWO, **HAND, "tp": 2},
    "dp-pp": {**LLAMA, "micro_batch": 1, "micro_batches": 2, "dp": 2, "pp": 2},
    "fsdp2-tp": {**LLAMA, **TWO, "tp": 2, "zero": 3},
    "fsdp2-3": {**LLAMA, **THREE, "zero": 3},
}
"""Each is run whole, and cut off after two of its steps and gone on with."""
ROUNDED = {"ddp-3": {**LLAMA, **THREE}}
"""Likewise, but torch's DDP adds the gradients of more than two replicas up in another order in its first step."""
OTHERWISE = {
    "zero2": "pp",
    "pp": "fsdp2",
    "fsdp2": "tp-torch",
    "tp-torch": "dp-pp",
    "one": "fsdp2-tp",
    "fsdp2-tp": "one",
    "dp-pp": "zero2",
}
"""Cut off in one layout, gone on with in another, of the same model and global batch."""
NIGHTLY = {"dp-tp", "fsdp2-tp", "dp-pp", "fsdp2"}
"""Two axes split at once, on four ranks: by day such checkpoints are carried over bit for bit (`dp2tp2`,
`zero2tp2`), and runs that split one of the axes are cut off and gone on with; FSDP2 is on three ranks (`fsdp2-3`)."""
NIGHTLY_ORIGINS = {"one", "fsdp2-tp", "dp-pp", "fsdp2"}
"""Of `OTHERWISE`: by day the other three go on, to a pipeline by hand, FSDP2 and replicas of torch's pipeline."""
AT_NIGHT = bool(os.environ.get("DLOJZ_NIGHTLY"))
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tp": 2, **HAND},
    "pp2": {"pp": 2, **HAND},
    "zero2": {"dp": 2, "zero": 2, **HAND},
    "tp4": {"tp": 4},
    "pp4": {"pp": 4},
    "zero4": {"dp": 4, "zero": 3},
    "dp2tp2": {"dp": 2, "tp": 2, **HAND},
    "zero2tp2": {"dp": 2, "tp": 2, "zero": 3},
}
"""1, 2 and 4 ranks, split along each axis and along two, by hand and by torch: each takes what others have kept."""
ORIGINS = {
    layout: dict.fromkeys(("one", "zero2tp2", layout, list(LAYOUTS)[number - 1]))
    for number, layout in enumerate(LAYOUTS)
}
"""Whose checkpoints each reads: of one rank, of the most split, its own, and those of the layout before it."""
NIGHTLY_LAYOUTS = {"tp4", "zero4"}
"""One axis split by torch among four ranks: by day `zero2tp2` is split along both."""
SAME = {"model": "gpt_tiny", "sequence_length": 16, "learning_rate": 0.01, "steps": 2, "device": "cpu"}


def config_of(layout: str) -> RunConfig:
    fields = LAYOUTS[layout]
    share = 4 // fields.get("dp", 1)
    return RunConfig.of(**SAME, **fields, micro_batch=1, micro_batches=share)


def prepare(folder: Path) -> None:
    made = Runs(folder)
    jobs: dict[int, list[dict[str, Any]]] = {1: [], 2: [], 3: [], 4: []}
    for name, fields in {**RUNS, **ROUNDED}.items():
        if name in NIGHTLY and not AT_NIGHT:
            continue
        config = RunConfig.of(**fields)
        whole, cut = (made.prepare(f"{kind}/{name}", config) for kind in ("whole", "cut"))
        jobs[config.layout.world_size] += [{"train": whole}, {"train": cut, "stop_after": 1}, {"train": cut}]
    bad = made.prepare("nan", RunConfig.of(**{**RUNS["zero2"], "steps": 6}))
    (Path(bad) / "checkpoint_policy.json").write_text('{"every_steps": 1, "keep": 3}')
    jobs[2].append({"train": bad, "nan_at": 3})
    layouts = [layout for layout in LAYOUTS if AT_NIGHT or layout not in NIGHTLY_LAYOUTS]
    for layout in layouts:
        config = config_of(layout)
        folder = made.prepare(f"kept/{layout}", config)
        (Path(folder) / "checkpoint_policy.json").write_text('{"every_steps": 2}')
        jobs[config.layout.world_size].append({"train": folder})
    for processes, listed in jobs.items():
        made.do(listed, processes)
    again: dict[int, list[dict[str, Any]]] = {1: [], 2: [], 4: []}
    for layout in layouts:
        config = config_of(layout)
        sources = [str(made.root / "kept" / other) for other in ORIGINS[layout] if other in layouts]
        job = {"carry": sources, "to": made.prepare(f"carried/{layout}", config)}
        again[config.layout.world_size].append(job)
    for origin, layout in OTHERWISE.items():
        if origin in NIGHTLY_ORIGINS and not AT_NIGHT:
            continue
        config = RunConfig.of(**RUNS[layout])
        folder = made.prepare(f"otherwise/{origin}", config)
        shutil.copytree(made.root / "cut" / origin / "checkpoints", Path(folder) / "checkpoints")
        again[config.layout.world_size].append({"train": folder})
    for processes, listed in again.items():
        made.do(listed, processes)


def marked(names: Iterable[str], later: set[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.nightly if name in later else []) for name in names]


@pytest.mark.parametrize("name", marked(RUNS, NIGHTLY))
def test_checkpoints_let_a_cut_run_end_as_what_was_not_cut_off(runs: Runs, name: str) -> None:
    """Bit for bit: losses of the steps after the cut, and the checksum of the final weights."""
    assert runs.told(f"cut/{name}", "checkpoint_failed", "reason") == []
    assert runs.told(f"cut/{name}", "resumed", "step") == [2]
    assert runs.told(f"cut/{name}", "end", "status") == ["timeout", "completed"]
    assert runs.told(f"cut/{name}", "step", "step") == list(range(RUNS[name]["steps"]))
    assert runs.told(f"cut/{name}", "step", "loss") == runs.told(f"whole/{name}", "step", "loss")
    weights = runs.told(f"whole/{name}", "weights", "sha256")
    assert runs.told(f"cut/{name}", "weights", "sha256") == weights
    assert len(weights) == 1


def test_checkpoints_of_three_ddp_replicas_go_on_but_for_the_last_bits(runs: Runs) -> None:
    """Relative 1e-6: the first step after the cut adds three gradients up in another order, and fp32 has 24 bits."""
    whole, cut = (runs.told(f"{kind}/ddp-3", "step", "loss") for kind in ("whole", "cut"))
    assert runs.told("cut/ddp-3", "resumed", "step") == [2]
    assert cut == pytest.approx(whole, rel=1e-6)
    assert cut[:3] == whole[:3]  # the loss after the cut is found before any gradient is added up


def test_checkpoints_stop_all_ranks_at_one_step_and_say_how_to_go_on(runs: Runs) -> None:
    """Only the last rank was told to."""
    for rank in (0, 1):
        reason = runs.told("cut/zero2", "end", "reason", rank)[0]
        assert "told to stop before the time limit (SIGUSR2), after 2 of 3 steps; a checkpoint holds them all" in reason
        assert runs.told("cut/zero2", "checkpoint", "step", rank) == [2]


@pytest.mark.parametrize("origin", marked(OTHERWISE, NIGHTLY_ORIGINS))
def test_checkpoints_go_on_in_another_layout_to_the_same_losses(runs: Runs, origin: str) -> None:
    """Relative 1e-5: the order of summation is all that differs."""
    expected = runs.told(f"whole/{origin}", "step", "loss")
    assert runs.told(f"otherwise/{origin}", "step", "step") == [2]
    assert runs.told(f"otherwise/{origin}", "step", "loss") == pytest.approx(expected[2:], rel=1e-5)


@pytest.mark.parametrize(
    ("origin", "layout"),
    [
        pytest.param(origin, layout, marks=pytest.mark.nightly if NIGHTLY_LAYOUTS & {origin, layout} else [])
        for layout in LAYOUTS
        for origin in ORIGINS[layout]
    ],
)
def test_checkpoint_tensors_of_one_layout_another_gives_back_bit_for_bit(runs: Runs, origin: str, layout: str) -> None:
    number = [other for other in ORIGINS[layout] if AT_NIGHT or other not in NIGHTLY_LAYOUTS].index(origin)
    kept, given = kept_states(runs.root / "kept" / origin), states(runs.root / "carried" / layout / f"{number}")
    assert list(kept) == list(given)
    assert len(kept) % 3 == 0
    for name, tensor in kept.items():
        assert torch.equal(tensor.view(torch.int32), given[name].view(torch.int32)), name
    assert any(tensor.any() for name, tensor in kept.items() if name.startswith("exp_avg_sq/"))


def states(run: Path) -> dict[str, torch.Tensor]:
    """Weights and moments of the only checkpoint, by name."""
    [one] = listing(run)
    with CheckpointTensors(one.folder, verify(one.folder)) as source:
        kinds = ("weights", *OPTIMIZERS["adamw"].state_tensors)
        return {name: source.tensor(name) for name in sorted(source.manifest.tensors) if name.split("/")[0] in kinds}


kept_states = cache(states)
"""Read once, compared with what every layout gives back."""


@pytest.mark.parametrize("name", ["one", "ddp-coatnet", "zero3-bf16", "pp-torch-momentum", "deepspeed-zero2-momentum"])
def test_the_bytes_of_a_checkpoint_are_those_predicted(runs: Runs, name: str) -> None:
    """Exactly those of the tensors; the files have their headers besides, less than 1 KiB per tensor."""
    [one] = listing(runs.root / "cut" / name)
    manifest = verify(one.folder)
    with CheckpointTensors(one.folder, manifest) as source:
        tensors = [source.tensor(kept) for kept in manifest.tensors]
    assert sum(tensor.numel() * tensor.element_size() for tensor in tensors) == checkpoint_bytes(manifest.config)
    assert 0 < manifest.bytes - checkpoint_bytes(manifest.config) < 1024 * len(tensors)


def test_footprint_of_a_step_has_no_part_in_what_a_checkpoint_sends(runs: Runs) -> None:
    """The run that keeps one after each traced step measures the communication that the one without measures."""
    whole, keeping = (runs.told(name, "footprint", "footprint")[-1] for name in ("whole/zero2", "nan"))
    assert keeping["communication"] == whole["communication"]
    assert keeping["memory"]["peak_bytes"] == whole["memory"]["peak_bytes"]


def test_listing_and_checkpoint_tensors_never_keep_a_loss_that_is_no_number(runs: Runs) -> None:
    assert runs.told("nan", "end", "status") == ["diverged"]
    assert [one.step for one in listing(runs.root / "nan")] == [3, 2, 1]
    assert all(tensor.isfinite().all() for tensor in newest_tensors(runs.root / "nan"))


def newest_tensors(run: Path) -> list[torch.Tensor]:
    one = listing(run)[0]
    with CheckpointTensors(one.folder, verify(one.folder)) as source:
        return [source.tensor(name) for name in source.manifest.tensors]


def test_footprint_of_what_goes_on_is_that_of_what_was_not_cut_off(runs: Runs) -> None:
    """Its first three steps are traced, their memory and communication those of any steady step."""
    whole, cut = (runs.told(f"{kind}/ddp-coatnet", "footprint", "footprint")[-1] for kind in ("whole", "cut"))
    assert len(runs.told("cut/ddp-coatnet", "memory_timeline", "samples")) == 1
    assert cut["communication"] == whole["communication"]
    for category in ("weights", "gradients", "optimizer", "buffers", "activations"):
        assert cut["memory"][f"{category}_bytes"] == whole["memory"][f"{category}_bytes"]


def forked(act: Callable[[], int]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            # The threads that have computed for the tests before are not in the child, which would wait for them.
            torch.set_num_threads(1)
            code = act()
        finally:
            os._exit(code)
    return pid


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_worker_main_ends_in_good_order_at_the_real_signal_and_goes_on(tmp_path: Path) -> None:
    """SIGUSR2 to the process itself: exit code 75; the same folder again: the rest of the steps, exit code 0."""
    run = Runs(tmp_path)
    folder = Path(run.prepare("run", RunConfig.of(**{**LLAMA, **FOUR, "steps": 100_000})))
    (folder / "events").mkdir()
    pid = forked(lambda: main(folder))
    deadline = time.monotonic() + 120
    while len(run.told("run", "step", "step")) < 4 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(pid, signal.SIGUSR2)
    assert ended(pid) == STOPPED_IN_TIME == 75
    done = len(run.told("run", "step", "step"))
    assert run.told("run", "end", "status") == ["timeout"]
    assert [one.step for one in listing(folder)] == [done] == run.told("run", "checkpoint", "step")
    (folder / "config.json").write_text(RunConfig.of(**{**LLAMA, **FOUR, "steps": done + 2}).to_json())
    assert ended(forked(lambda: main(folder))) == 0
    assert run.told("run", "end", "status") == ["timeout", "completed"]
    assert run.told("run", "step", "step") == list(range(done + 2))


def test_worker_main_loses_a_checkpoint_and_not_the_run_to_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Runs(tmp_path)
    folder = Path(run.prepare("run", RunConfig.of(**LLAMA, **FOUR)))
    (folder / "events").mkdir()
    (folder / "checkpoint_policy.json").write_text('{"every_steps": 3}')
    monkeypatch.setenv("DLOJZ_FAULTPOINT", "checkpoint.write:3:enospc")
    assert ended(forked(lambda: main(folder))) == 0
    assert run.told("run", "end", "status") == ["completed"]
    assert run.told("run", "checkpoint_failed", "step") == [3]
    assert "No space left on device" in run.told("run", "checkpoint_failed", "reason")[0]
    assert list((folder / "checkpoints").iterdir()) == []


def test_a_data_loaders_worker_outlives_the_signal() -> None:
    def act() -> int:
        ignore_stop_signal(0)
        os.kill(os.getpid(), signal.SIGUSR2)
        return 3

    assert ended(forked(act)) == 3


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_open_batches_goes_on_with_the_data_where_they_were(micro_batches: int) -> None:
    config = RunConfig.of(model="coatnet_tiny", image_size=32, dp=2, micro_batch=4, micro_batches=micro_batches)
    whole, later = loop.open_batches(config, 1), loop.open_batches(config, 1, 150)
    for _ in range(150 * micro_batches):  # beyond the end of an epoch
        next(whole)
    for _ in range(3):
        (inputs, targets), (expected, wanted) = next(later), next(whole)
        assert torch.equal(inputs, expected) and torch.equal(targets, wanted)
