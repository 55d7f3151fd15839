"""Models that nobody here wrote: predicted, then run on 1 and 2 processes, and laid over one another.

    python benchmarks/foreign_models.py                                   # all: about half an hour on 2 cores
    python benchmarks/foreign_models.py --models timm:resnet18 torchvision:vgg11

Each is trained for three steps on one process, with DDP and with FSDP2 on two. States and collectives must be equal to
the byte; the peak is compared, and the losses with those of one process, where nothing in the model is drawn at random.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from dlojz import models as catalogue
from dlojz import predict
from dlojz.base.errors import LabError
from dlojz.config.run_config import RunConfig
from dlojz.results.footprint import STATES, Footprint
from dlojz.results.record import read_events

WORKER = Path(__file__).resolve().parents[1] / "tests" / "train" / "matrix.py"
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {"micro_batches": 2},
    "DDP": {"dp": 2},
    "FSDP2 (ZeRO-2)": {"dp": 2, "zero": 2},
    "FSDP2": {"dp": 2, "zero": 3},
}
SIZES = {
    "timm:convnext_atto": 64, "timm:resnet18": 64, "timm:resnest14d": 64, "timm:vit_tiny_patch16_224": 64,
    "timm:deit_tiny_patch16_224": 64, "timm:swin_tiny_patch4_window7_224": 224, "timm:efficientnet_b0": 64,
    "timm:mobilenetv3_small_100": 64, "timm:maxvit_rmlp_pico_rw_256": 256, "timm:coatnet_nano_rw_224": 224,
    "timm:mixer_s32_224": 224, "timm:regnetx_002": 64, "timm:densenet121": 64, "timm:ghostnet_100": 64,
    "timm:poolformer_s12": 64, "timm:xcit_nano_12_p16_224": 64,
    "torchvision:resnet18": 64, "torchvision:resnet50": 64, "torchvision:vgg11": 64, "torchvision:densenet121": 64,
    "torchvision:vit_b_16": 64, "torchvision:mobilenet_v3_small": 64, "torchvision:shufflenet_v2_x0_5": 64,
    "torchvision:mnasnet0_5": 64, "torchvision:swin_t": 64, "torchvision:alexnet": 64,
}  # fmt: skip
"""Models, and the side of their images."""


def run(configs: dict[str, RunConfig], processes: int, folder: Path) -> None:
    """Train all of them, one after the other, in the processes of one launch."""
    for name, config in configs.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(config.to_json())
    with (folder / "log.txt").open("w") as log:
        done = subprocess.run(
            [sys.executable, str(WORKER), str(folder), str(processes)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"the runs failed; the end of their log:\n{(folder / 'log.txt').read_text()[-2000:]}")


def main(models: tuple[str, ...] = tuple(SIZES)) -> None:
    """Predict, run, compare and print a line for each model and layout."""
    table = Table(title="models from elsewhere, predicted and run")
    for column in ("model", "layout", "blocks", "states", "collectives", "peak", "losses"):
        table.add_column(column, justify="left" if column in ("model", "layout") else "right")
    errors: list[float] = []
    for model in models:
        size = {"image_size": SIZES[model]} if model in SIZES else {}
        common = {"model": model, **size, "micro_batch": 4, "steps": 3, "optimizer": "momentum", "device": "cpu"}
        try:
            configs = {name: RunConfig.of(**common, **fields) for name, fields in LAYOUTS.items()}
            blocks = str(catalogue.describe(model, configs["DDP"].image_size).blocks)
        except LabError as error:
            table.add_row(model, str(error))
            continue
        losses: list[float] = []
        with tempfile.TemporaryDirectory() as folder:
            for number in (1, 2):
                within = Path(folder) / str(number)
                run({name: one for name, one in configs.items() if one.layout.world_size == number}, number, within)
            for name, config in configs.items():
                events = read_events(Path(folder) / str(config.layout.world_size) / name / "events" / "rank-0.jsonl")
                told = predict(config)
                counted = [Footprint.from_dict(one["footprint"]) for one in events if one["event"] == "footprint"][-1]
                found = [one["loss"] for one in events if one["event"] == "step"]
                losses = losses or found
                errors.append((told.memory.peak_bytes or 0) / (counted.memory.peak_bytes or 1) - 1)
                exact = all(told.memory.category(state) == counted.memory.category(state) for state in STATES)
                sent = "equal" if told.communication == counted.communication else "other"
                far = max(abs(one - other) / abs(other) for one, other in zip(found, losses, strict=True))
                table.add_row(
                    *(model, name, blocks, "equal" if exact else "other", sent),
                    *(f"{100 * errors[-1]:+.2f} %", f"{far:.0e}"),
                )
    Console(width=130).print(table)
    sizes = [abs(error) for error in errors]
    print(f"peak: median error {100 * statistics.median(sizes):.2f} %, worst {100 * max(sizes):.2f} %")


if __name__ == "__main__":
    tyro.cli(main)
