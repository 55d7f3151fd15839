"""What sparsity gains and does not gain in time: one dense layer, masked, as sparse rows, and 2:4 where a GPU has it.

    python benchmarks/sparse_speed.py --rounds 50 --out sparse_speed

Each form is timed in turns with the dense layer, ratios are within a round. Prints the tables, and writes OUT.json.
With `--device cuda` the weights are in float16 and the layers large: a product must take longer than the Python that
launches it, above all in 2:4.
"""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from pathlib import Path

import torch

from dlojz.base.errors import LabError
from dlojz.compress.two_to_four import crossing, has_semi_structured, sparse_speed

LAYERS = ((512, 128, 320), (1024, 1024, 64), (1024, 1024, 1))
"""Outputs, inputs, rows of the inputs: the MLP of vit_tiny on 64 images of 5 tokens, a wider layer, one row alone."""

GPU_LAYERS = ((4096, 4096, 1024), (8192, 8192, 1024), (4096, 4096, 64))
"""What a GPU needs to be busy: a layer of a model of several billions of weights, a wider one, few rows."""


def main(rounds: int = 50, threads: int = 1, device: str = "cpu", out: str = "") -> None:
    """Measure, print and keep.

    Args:
        rounds: of timing, each form beside the dense layer.
        threads: of torch on the CPU.
        device: cpu or cuda.
        out: path without ending; nothing is written where it is empty.
    """
    torch.set_num_threads(threads)
    kept = []
    for outputs, inputs, batch in GPU_LAYERS if device.startswith("cuda") else LAYERS:
        try:
            speeds = sparse_speed(outputs, inputs, batch, rounds=rounds, device=device)
        except LabError as refusal:
            raise SystemExit(str(refusal)) from None
        kept.append({"outputs": outputs, "inputs": inputs, "batch": batch, "speeds": [asdict(one) for one in speeds]})
        print(f"\n{outputs} × {inputs}, {batch} row(s), {device}, {threads} thread(s), {rounds} rounds")
        print("form              zeros  expected     ratio [quartiles]        bytes        ms")
        for one in speeds:
            quartiles = f"[{one.ratio_low:.3f}, {one.ratio_high:.3f}]"
            print(f"{one.form:<16} {one.sparsity:6.0%}  {one.predicted_ratio:8.2f}  {one.ratio:8.3f} {quartiles:<16}"
                  f"  {one.bytes_ratio:8.3f}  {1e3 * one.seconds:8.3f}")  # fmt: skip
        print(f"sparse rows as fast as the dense layer from: {crossing(speeds)}")
    if not has_semi_structured(device):
        print("\n2:4 in hardware was not run: it needs --device cuda on an NVIDIA GPU since Ampere")
    if out:
        machine = {"machine": platform.machine(), "torch": torch.__version__, "threads": threads, "device": device}
        Path(f"{out}.json").write_text(json.dumps({**machine, "rounds": rounds, "layers": kept}, indent=1))


if __name__ == "__main__":
    import tyro  # gpu_units.py uses what is above, where nothing else needs tyro

    tyro.cli(main)
