"""Models that nobody here wrote: predicted, then run on 1 and 2 processes, and laid over one another.

    python benchmarks/foreign_models.py --page docs/foreign_models.md   # all: ten minutes on 2 cores, and their page
    python benchmarks/foreign_models.py --models timm:resnet18 torchvision:vgg11
    python benchmarks/foreign_models.py --profiled    # vision models in plain torch, their peak by torch's profiler

Each is trained for three steps on one process, with DDP and with FSDP2 on two. States and collectives must be equal to
the byte; the peak is compared, and the losses with those of one process, where nothing in the model is drawn at random.
All runs of one number of processes go through one launch; one that fails is named, and the others go on.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from dlojz import models as catalogue
from dlojz import predict
from dlojz.base.errors import LabError
from dlojz.base.table import Table
from dlojz.config.run_config import RunConfig
from dlojz.results.footprint import STATES, Footprint
from dlojz.results.record import read_events

ROOT = Path(__file__).resolve().parents[1]
WORKER = ROOT / "tests" / "train" / "matrix.py"
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {"micro_batches": 2},
    "DDP": {"dp": 2},
    "FSDP2 (ZeRO-2)": {"dp": 2, "zero": 2},
    "FSDP2 (ZeRO-3)": {"dp": 2, "zero": 3},
}
IMAGES = {
    "timm:resnet18": 64, "timm:resnest14d": 64, "timm:densenet121": 64, "timm:efficientnet_b0": 64,
    "timm:mobilenetv3_small_100": 64, "timm:ghostnet_100": 64, "timm:regnetx_002": 64, "timm:convnext_atto": 64,
    "timm:vit_tiny_patch16_224": 64, "timm:deit_tiny_patch16_224": 64, "timm:swin_tiny_patch4_window7_224": 224,
    "timm:maxvit_rmlp_pico_rw_256": 128, "timm:coatnet_nano_rw_224": 64, "timm:mixer_s32_224": 64,
    "timm:poolformer_s12": 64, "timm:xcit_nano_12_p16_224": 64,
    "torchvision:resnet18": 64, "torchvision:resnet50": 64, "torchvision:vgg11": 64, "torchvision:densenet121": 64,
    "torchvision:vit_b_16": 64, "torchvision:swin_t": 64, "torchvision:mobilenet_v3_small": 64,
    "torchvision:shufflenet_v2_x0_5": 64, "torchvision:mnasnet0_5": 64, "torchvision:alexnet": 64,
}  # fmt: skip
"""Models, and the side of their images."""
SMALL = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
GROUPED = {**SMALL, "num_key_value_heads": 2}
BERT = {**SMALL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "bert": BERT,
    "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 4, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    "llama": GROUPED,
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 3, "num_heads": 4, "dropout_rate": 0},
    "mixtral": {**GROUPED, "num_local_experts": 4},
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 16},
    "vit": {**BERT, "image_size": 64, "patch_size": 8},
}
"""Configurations of transformers (an optional extra), small, by the type of their models; without dropout."""
OWN = f"{Path(__file__).with_name('own_backbone.py')}:build"
TOKENS = 32
ATTEMPTS, NEAR = 3, 1e-3


PAGE = """# Models from elsewhere: predicted, run, compared

Written by `python benchmarks/foreign_models.py --page docs/foreign_models.md`. Each model is trained for three steps on
one process, with DDP and with FSDP2 on two (gloo, CPU). States and collectives: bytes by category, calls and bytes by
collective, on every rank. Peak: predicted over counted, of the rank that is furthest off; a run that is off by more
than 0.1 % is made again, at most twice, and the smallest count is taken, as gloo's thread may hold a message for a
moment after it has arrived. Losses: largest relative difference from those of one process; a model that draws at random
(dropout, stochastic depth) has others.
"""


PROFILED_TITLE = "## Vision models in plain torch"
PROFILED_PAGE = f"""{PROFILED_TITLE}

Written by `python benchmarks/foreign_models.py --profiled --page docs/foreign_models.md`: two steps of AdamW on two
images in plain torch, without the engines and the tracker of this package; the peak is that of torch's CPU allocator,
from its profiler. What is not forecast are the copies and the scratch memory that the CPU's kernels allocate within an
operator and free before it ends: oneDNN takes 43 MB in the backward of one convolution of 32 × 32 on two images. They
depend on the processor, and are much beside images and batches as small as these.
"""


@dataclass(frozen=True)
class Row:
    """A run beside its prediction: equal to the byte or not, relative errors, or why there is none."""

    model: str
    layout: str
    states: bool = False
    sent: bool = False
    peak: float = 0.0
    losses: float | None = None
    failure: str = ""

    def cells(self) -> tuple[str, ...]:
        """Write the row."""
        model = self.model.rpartition("/")[2]
        if self.failure:
            return model, self.layout, self.failure, "", "", ""
        losses = "random" if self.losses is None else "equal" if not self.losses else f"{self.losses:.0e}"
        equal = ("equal" if one else "other" for one in (self.states, self.sent))
        peak = f"{100 * self.peak:+.2f} %".replace("+0.00", "0.00").replace("-0.00", "0.00")
        return model, self.layout, *equal, peak, losses


def given(model: str, folder: Path) -> dict[str, Any]:
    """Fields of a run of a model that all layouts share; a configuration is written into a folder."""
    size = {"image_size": IMAGES[model]} if model in IMAGES else {}
    kind = model.removeprefix("hf:")
    if kind in CONFIGURATIONS:
        image = "image_size" in CONFIGURATIONS[kind]
        (folder / kind).mkdir(parents=True)
        described = {"model_type": kind, **({} if image else {"vocab_size": 256}), **CONFIGURATIONS[kind]}
        (folder / kind / "config.json").write_text(json.dumps(described))
        model, size = f"hf:{folder / kind}", {} if image else {"sequence_length": TOKENS}
    training = {"micro_batch": 4, "steps": 3, "optimizer": "momentum", "learning_rate": 0.001, "device": "cpu"}
    return {"model": model, **size, **training}


def launch(folder: Path, processes: int) -> None:
    """Train all runs of a folder, one after the other, in the processes of one launch; again without one that fails."""
    waiting = {path.parent for path in folder.glob("*/config.json")} if folder.is_dir() else set()
    total = len(waiting)
    while waiting:
        with (folder / "log.txt").open("w") as log:
            running = subprocess.Popen(
                [sys.executable, str(WORKER), str(folder), str(processes)],
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
                stdout=log,
                stderr=log,
            )
            told = -1
            while running.poll() is None:
                done = total - sum(not ended(run) for run in waiting)
                if done != told:
                    print(f"processes: {processes}, runs: {done} of {total}", file=sys.stderr)
                told = done
                time.sleep(1)
        for run in sorted(waiting):
            if ended(run) or running.returncode:
                (run / "config.json").rename(run / "done.json")  # the worker runs what has a configuration
                waiting.remove(run)
            if not ended(run):
                (run / "log.txt").write_text((folder / "log.txt").read_text())
                break


def ended(run: Path) -> bool:
    """Whether the last event of rank 0 says how the run ended."""
    told = run / "events" / "rank-0.jsonl"
    return told.is_file() and bool(lines := told.read_text().splitlines()) and json.loads(lines[-1])["event"] == "end"


def compared(model: str, layout: str, config: RunConfig, run: Path, losses: list[float], random: bool) -> Row:
    """Lay a run over its prediction, rank by rank; of the peaks the one that is furthest off."""
    states, sent, peaks = True, True, []
    for rank in range(config.layout.world_size):
        events = read_events(run / "events" / f"rank-{rank}.jsonl")
        counted = next((one["footprint"] for one in reversed(events) if one["event"] == "footprint"), None)
        if counted is None:
            return Row(model, layout, failure=(run / "log.txt").read_text().strip().splitlines()[-1][:150])
        counted, told = Footprint.from_dict(counted), predict(config, rank)
        states &= all(told.memory.category(state) == counted.memory.category(state) for state in STATES)
        sent &= told.communication == counted.communication
        peaks.append((told.memory.peak_bytes or 0) / (counted.memory.peak_bytes or 1) - 1)
    found = [one["loss"] for one in read_events(run / "events" / "rank-0.jsonl") if one["event"] == "step"]
    losses += [] if losses else found
    far = max(abs(one - other) / abs(other) for one, other in zip(found, losses, strict=True))
    return Row(model, layout, states, sent, max(peaks, key=abs), None if random else far)


def draws(config: RunConfig) -> bool:
    """Whether a forward pass draws at random, as dropout does: the same batch gives another output."""
    import torch

    from dlojz.models.blocks import loss_of
    from dlojz.models.meta import sample_inputs

    module = catalogue.build(config.model, image_size=config.image_size, sequence_length=config.sequence_length)
    how = {"image_size": config.image_size, "sequence_length": config.sequence_length}
    batch = sample_inputs(config.model, 2, **how, device="cpu")  # type: ignore[arg-type]
    image = batch.is_floating_point()
    batch = torch.rand_like(batch) if image else batch.random_(0, config.num_classes)
    targets = torch.zeros(batch.shape[:1] if image else batch.shape, dtype=torch.long)
    losses = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        with torch.no_grad():
            losses.append(loss_of(module)(module.train()(batch), targets))
    return not torch.equal(*losses)


def measured(models: Iterable[str], folder: Path) -> list[Row]:
    """Run all layouts of all models, and lay each over its prediction; again where the peak is far off.

    gloo's thread may hold a message for a moment after it has arrived, which only adds to what is counted: the smallest
    of up to three runs is taken.
    """
    rows: dict[tuple[str, str], Row] = {}
    configs: dict[tuple[str, str], RunConfig] = {}
    for model in models:
        try:
            common = given(model, folder / "configurations")
            configs |= {(model, name): RunConfig.of(**common, **fields) for name, fields in LAYOUTS.items()}
        except LabError as error:
            rows[model, ""] = Row(model, "", failure=str(error))
    random = {model: draws(configs[model, "DDP"]) for model, name in configs if name == "DDP"}
    losses: dict[str, list[float]] = {model: [] for model in random}
    waiting = list(configs)
    for attempt in range(ATTEMPTS):
        folders = {}
        for number, key in enumerate(waiting):
            folders[key] = folder / f"{attempt}-{configs[key].layout.world_size}" / f"{number:03}"
            folders[key].mkdir(parents=True)
            (folders[key] / "config.json").write_text(configs[key].to_json())
        for processes in (1, 2):
            launch(folder / f"{attempt}-{processes}", processes)
        for key in waiting:
            row = compared(*key, configs[key], folders[key], losses[key[0]], random[key[0]])
            rows[key] = max(rows.get(key, row), row, key=lambda one: one.peak)
            print(*rows[key].cells(), sep="  ", file=sys.stderr)
        waiting = [key for key in waiting if abs(rows[key].peak) > NEAR]
    return list(rows.values())


def summary(rows: list[Row]) -> str:
    """Count what is equal, and sum up the errors of the peaks."""
    ran = [row for row in rows if not row.failure]
    if not ran:
        return "nothing was run."
    peaks = [abs(row.peak) for row in ran]
    told = [row for row in ran if row.losses is not None]
    return (
        f"{len({row.model for row in ran})} models, {len(ran)} runs. States equal to the byte: "
        f"{sum(row.states for row in ran)} of {len(ran)}; collectives: {sum(row.sent for row in ran)} of {len(ran)}. "
        f"Peak: median error {100 * statistics.median(peaks):.2f} %, worst {100 * max(peaks):.2f} %. Losses within "
        f"1e-4 of those of one process: {sum((row.losses or 0) < 1e-4 for row in told)} of {len(told)}, the other "
        "models draw at random."
    )


PROFILED = {
    **{"timm:regnetz_c16": 128, "timm:dla34": 64, "timm:vit_tiny_patch16_224": 224, "timm:resnet26": 64},
    **{"timm:mobilenetv4_conv_small": 64, "timm:convnextv2_atto": 64, "timm:efficientvit_b0": 64, "timm:pvt_v2_b0": 64},
    **{"timm:levit_128s": 224, "timm:nf_resnet26": 64, "timm:repvgg_a0": 64, "timm:fastvit_t8": 64},
    **{"torchvision:regnet_x_400mf": 64, "torchvision:regnet_y_400mf": 64, "torchvision:googlenet": 64},
    **{"torchvision:inception_v3": 128, "torchvision:squeezenet1_1": 64, "torchvision:mnasnet0_5": 64},
    **{"torchvision:efficientnet_b0": 64, "torchvision:swin_v2_t": 64, "torchvision:vgg11": 64},
    **{"torchvision:lraspp_mobilenet_v3_large": None, "torchvision:mc3_18": None, "torchvision:r3d_18": None},
}
"""Models that are trained in plain torch, and the side of their images where it can be chosen."""


TRAINING = "training"


def profiled_peak_bytes(config: RunConfig) -> int:
    """Train two steps of AdamW in plain torch, without the lab's engine; return the peak of torch's CPU allocator.

    The allocator's total is what its profiler reports with each allocation, less what there was before the model.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    from dlojz.models.blocks import loss_of
    from dlojz.models.meta import sample_inputs, targets_shape

    shape = {"image_size": config.image_size, "sequence_length": config.sequence_length}
    samples = config.layout.micro_batch
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model = catalogue.build(config.model, **shape, num_classes=config.num_classes).train()  # type: ignore[arg-type]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
        loss_function = loss_of(model)
        with record_function(TRAINING):
            for _ in range(2):
                batch = sample_inputs(config.model, samples, **shape, device="cpu")  # type: ignore[arg-type]
                batch = batch.normal_() if batch.is_floating_point() else batch.random_(3, config.num_classes)
                targets = torch.zeros(targets_shape(config.model, samples, config.sequence_length), dtype=torch.long)
                loss_function(model(batch), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    memory = sorted((one for one in events if one.get("name") == "[memory]"), key=lambda one: one["ts"])
    first = memory[0]["args"]
    before = first["Total Allocated"] - first["Bytes"]
    start = next(one["ts"] for one in events if one.get("name") == TRAINING)  # a model may take more while it is built
    return int(max(one["args"]["Total Allocated"] for one in memory if one["ts"] >= start)) - int(before)


def profile_all(models: Iterable[str]) -> Table:
    """Lay the forecast of each model over what plain torch takes."""
    rows, errors = [], []
    for model in models:
        size = {"image_size": PROFILED[model]} if PROFILED.get(model) else {}
        config = RunConfig.of(model=model, micro_batch=2, device="cpu", **size)
        counted, told = profiled_peak_bytes(config), predict(config).memory.peak_bytes or 0
        errors.append(abs(told / counted - 1))
        rows.append((model, f"{told / 2**20:.1f}", f"{counted / 2**20:.1f}", f"{100 * (told / counted - 1):+.2f} %"))
        print(*rows[-1], sep="  ", file=sys.stderr)
    note = f"median error {100 * statistics.median(errors):.2f} %, worst {100 * max(errors):.2f} %."
    head = ("model", "predicted, MiB", "plain torch, MiB", "difference")
    return Table(head, tuple(rows), align="lrrr", whole=1, notes=(note,))


ALL = (*IMAGES, *(f"hf:{kind}" for kind in CONFIGURATIONS), OWN)


def main(models: tuple[str, ...] = ALL, page: Path | None = None, profiled: bool = False) -> None:
    """Predict, run, compare and print a line for each model and layout."""
    if profiled:
        table = profile_all(PROFILED if models == ALL else models)
        Console(width=130).print(table)
        if page is not None:
            above = page.read_text(encoding="utf-8").partition(PROFILED_TITLE)[0].rstrip()
            page.write_text(f"{above}\n\n{PROFILED_PAGE}\n{table.markdown()}\n", encoding="utf-8")
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = measured(models, Path(folder))
    head = ("model", "layout", "states", "collectives", "peak", "losses")
    table = Table(head, tuple(row.cells() for row in rows), align="llllrr", whole=2, notes=(summary(rows),))
    Console(width=130).print(table)
    if page is not None:
        _, title, below = page.read_text(encoding="utf-8").partition(PROFILED_TITLE) if page.is_file() else ("", "", "")
        page.write_text(f"{PAGE}\n{table.markdown()}\n{title and chr(10)}{title}{below}", encoding="utf-8")


if __name__ == "__main__":
    tyro.cli(main)
