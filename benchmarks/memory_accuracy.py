"""How near the predicted memory comes to the measured one, for every engine and stage, beside other estimators.

    python benchmarks/memory_accuracy.py                       # all: about half an hour on 2 cores
    python benchmarks/memory_accuracy.py --models vit_tiny --processes 1 2

Each configuration is really trained for three steps on 1, 2 and 4 processes; the peak of rank 0 is laid over the
forecast. The others are what users take today: 16 bytes per parameter; `accelerate estimate-memory` (four times the
fp32 weights); DeepSpeed's own estimators of ZeRO-2 and ZeRO-3; Korthikanti's formula added to the states, for decoders.
They do not claim to predict the peak; the table shows what happens to those who read them as if they did.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from dlojz import predict
from dlojz.config.run_config import RunConfig
from dlojz.models.sizes import GPT_SIZES, LLAMA_SIZES
from dlojz.prediction.rules_of_thumb import Shape, layer_bytes
from dlojz.results.footprint import STATES, Footprint, Memory
from dlojz.results.record import read_events

WORKER = Path(__file__).resolve().parents[1] / "tests" / "train" / "matrix.py"
ENGINES: dict[str, dict[str, Any]] = {
    "one process": {},
    "DDP": {},
    "DDP by hand": {"engine": "by_hand"},
    **{f"ZeRO-{stage} by hand": {"engine": "by_hand", "zero": stage} for stage in (1, 2, 3)},
    "FSDP2 (ZeRO-2)": {"zero": 2},
    "FSDP2": {"zero": 3},
    **{f"DeepSpeed ZeRO-{stage}": {"engine": "deepspeed", "zero": stage} for stage in range(4)},
}
BATCHES = {"coatnet_tiny": (4, 16), "coatnet_0": (2, 4), "vit_tiny": (4, 16), "gpt_tiny": (2, 8)}
SIZES = {"coatnet_0": {"image_size": 96, "data": "synthetic"}}
VARIANTS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16, checkpointed": {"precision": "bf16", "checkpointing": "full"}}


def configurations(models: tuple[str, ...], processes: int) -> dict[str, RunConfig]:
    """What is run on so many processes, by name."""
    found = {}
    for model in models:
        for engine, fields in ENGINES.items():
            if (engine == "one process") != (processes == 1) and engine in ("one process", "DDP", "DDP by hand"):
                continue
            for micro_batch in BATCHES[model]:
                for variant, more in VARIANTS.items():
                    given = {"model": model, "micro_batch": micro_batch, "dp": processes, "steps": 3}
                    config = RunConfig.of(**given, **SIZES.get(model, {}), **fields, **more)
                    found[f"{model}.{engine}.{micro_batch}.{variant}".replace(" ", "-")] = config
    return found


def run(configs: dict[str, RunConfig], processes: int, folder: Path) -> None:
    """Train all of them, one after the other, in the processes of one launch."""
    for name, config in configs.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(config.to_json())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "log.txt").open("w") as log:
        done = subprocess.run(
            [*command, str(WORKER), str(folder)], env=environment, stdout=log, stderr=log, check=False
        )
    if done.returncode:
        raise SystemExit(f"the runs failed; the end of their log:\n{(folder / 'log.txt').read_text()[-2000:]}")


def measured(folder: Path) -> Memory:
    """What rank 0 has measured."""
    events = read_events(folder / "events" / "rank-0.jsonl")
    return [Footprint.from_dict(one["footprint"]) for one in events if one["event"] == "footprint"][-1].memory


def others(config: RunConfig, parameters: int) -> dict[str, float]:
    """What other estimators say, in bytes; those that say nothing of a configuration are left out."""
    layout = config.layout
    told = {"16 B per parameter": 16.0 * parameters, "accelerate": 4 * 4.0 * parameters}
    if layout.zero in (2, 3) and layout.engine == "deepspeed":
        from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
        from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

        gpus = {"num_gpus_per_node": layout.dp, "num_nodes": 1, "cpu_offload": False}
        if layout.zero == 2:
            told["DeepSpeed's estimator"] = estimate_zero2_model_states_mem_needs(parameters, **gpus)[1]
        else:
            largest = 0
            gpus["cpu_offload_params"] = False
            told["DeepSpeed's estimator"] = estimate_zero3_model_states_mem_needs(
                parameters, largest, **gpus, zero_init=True
            )[1]
    size = GPT_SIZES.get(config.model) or LLAMA_SIZES.get(config.model)
    if size is not None:
        shape = Shape(config.sequence_length or 1, layout.micro_batch, size.width, size.num_heads)
        form = layer_bytes(shape, checkpointing=layout.checkpointing)
        told["16 B + Korthikanti"] = 16.0 * parameters + size.depth * float(form)
    return told


def main(models: tuple[str, ...] = tuple(BATCHES), processes: tuple[int, ...] = (1, 2, 4)) -> None:
    """Run, compare, print: errors of the peak by engine, of the states, and of other estimators."""
    errors: dict[str, list[float]] = defaultdict(list)
    by_engine: dict[str, list[float]] = defaultdict(list)
    inexact: list[str] = []
    for number in processes:
        configs = configurations(models, number)
        with tempfile.TemporaryDirectory() as folder:
            run(configs, number, Path(folder))
            for name, config in configs.items():
                real, footprint = measured(Path(folder) / name), predict(config)
                told, peak_bytes = footprint.memory, real.peak_bytes or 1
                error = (told.peak_bytes or 0) / peak_bytes - 1
                by_engine[name.split(".")[1]].append(error)
                errors["dlojz"].append(error)
                if any(told.category(state) != real.category(state) for state in STATES):
                    inexact.append(f"{name} on {number}")
                for who, said_bytes in others(config, footprint.parameters or 0).items():
                    errors[who].append(said_bytes / peak_bytes - 1)
    for title, found in (("predicted peak over measured peak, by engine", by_engine), ("beside others", errors)):
        table = Table(title=title)
        for column in ("", "configurations", "median error", "worst error", "under by > 1 %"):
            table.add_column(column, justify="left" if not column else "right")
        for who, values in found.items():
            sizes = [abs(value) for value in values]
            under = sum(value < -0.01 for value in values)
            median, worst = statistics.median(sizes), max(values, key=abs)
            table.add_row(who, str(len(values)), f"{100 * median:.3f} %", f"{100 * worst:+.2f} %", str(under))
        Console(width=110).print(table)
    total = len(errors["dlojz"])
    print(f"states exact on {total - len(inexact)} of {total} configurations", *inexact, sep="\n  ")


if __name__ == "__main__":
    tyro.cli(main)
