"""Is INT8 faster on this machine? Layers of ViT, form by form, then whole models: foreseen by Amdahl's law, and timed.

    python benchmarks/int8_speed.py --rounds 20 --out int8_speed.json
    python benchmarks/int8_speed.py --compile           # fp32 and ours through torch.compile too: needs a C++ compiler
    python benchmarks/int8_speed.py --device cuda       # the same on a GPU

All forms answer in turns, each round beginning with another; ratios are to `fp32` in the same round, with their median
and quartiles: below 1 is faster. `fp32_onednn` is the same product by another library (with the conversions that it
asks for): where it beats `fp32`, a part of what INT8 gains is only MKL's loss.
"""

from __future__ import annotations

import copy
import json
import os
import platform
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils import mkldnn

from dlojz import models
from dlojz.compress.quantized_model import QuantizedLinear, quantize_model, speed_forecast
from dlojz.compress.quantizers import Scheme
from dlojz.compress.task import latencies

WIDTHS = {"vit_tiny": (128, 5), "vit_s_16": (384, 197), "vit_b_16": (768, 197)}
"""Width and tokens: 16×16 pixels with patches of 8, 224×224 with patches of 16."""
WHOLE = {"vit_tiny": 16, "vit_ti_16": 224, "vit_s_16": 224}
"""Models that are timed as a whole, with their image size."""


@dataclass(frozen=True)
class Row:
    """One form of one layer or model: what was timed, and what was foreseen of it."""

    model: str
    part: str
    batch: int
    form: str
    seconds: float
    ratio: float
    ratio_low: float
    ratio_high: float
    predicted_ratio: float | None = None
    linear_share: float | None = None


class OneDnn(nn.Module):
    """A linear layer by oneDNN in float32, with the conversions to its layout and back."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = mkldnn.to_mkldnn(copy.deepcopy(linear).eval())

    def forward(self, x: Tensor) -> Tensor:
        """As the layer."""
        answer: Tensor = self.linear(x.to_mkldnn()).to_dense()
        return answer


class Waiting(nn.Module):
    """A module that answers when the GPU has: a kernel is only asked for when its call returns."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        """As the module."""
        answer: Tensor = self.module(x)
        if answer.is_cuda:
            torch.cuda.synchronize()
        return answer


class Narrow(nn.Module):
    """A model in bfloat16, asked and answering in float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        """As the model."""
        answer: Tensor = self.model(x.to(torch.bfloat16))
        return answer.float()


def torch_dynamic_model(model: nn.Module) -> nn.Module:
    """A copy with linear layers of torch's dynamic INT8, the fast kernels of a CPU: inputs on 7 bits for the batch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", message="torch.quantize_per_tensor", category=UserWarning)
        changed: nn.Module = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model).eval(), {nn.Linear})
    return changed


def layer_forms(outputs: int, inputs: int, device: str, compiled: bool) -> dict[str, nn.Module]:
    """Every form that a layer of this shape has here, `fp32` first."""
    linear = nn.Sequential(nn.Linear(inputs, outputs)).eval().to(device)
    plain: nn.Linear = linear[0]  # type: ignore[assignment]
    forms: dict[str, nn.Module] = {"fp32": linear}
    if device == "cpu":
        forms["fp32_onednn"] = OneDnn(plain)
    forms["bf16"] = Narrow(copy.deepcopy(linear))
    forms["ours_weight_only"] = QuantizedLinear(plain, Scheme()).eval()
    forms["ours_dynamic"] = QuantizedLinear(plain, Scheme(), activations="dynamic").eval()
    if device == "cpu":
        forms["torch_dynamic"] = torch_dynamic_model(linear)
    if compiled:
        for name in ("fp32", "ours_weight_only", "ours_dynamic"):
            forms[f"{name}_compiled"] = torch.compile(forms[name])  # type: ignore[assignment]
    return forms


def time_forms(forms: dict[str, nn.Module], x: Tensor, rounds: int, label: tuple[str, str, int]) -> list[Row]:
    """Rows of all forms, timed in turns."""
    found = latencies([Waiting(form) for form in forms.values()], x, rounds)
    return [
        Row(*label, name, one.seconds, one.ratio, one.ratio_low, one.ratio_high)
        for name, one in zip(forms, found, strict=True)
    ]


def layers(model: str, batch: int, rounds: int, device: str, compiled: bool) -> list[Row]:
    """The four linear layers of a block."""
    width, tokens = WIDTHS[model]
    shapes = {
        "qkv": (3 * width, width),
        "attention_project": (width, width),
        "mlp_expand": (4 * width, width),
        "mlp_project": (width, 4 * width),
    }
    rows = []
    for part, (outputs, inputs) in shapes.items():
        torch.manual_seed(0)
        x = torch.randn(batch, tokens, inputs, device=device)
        rows += time_forms(layer_forms(outputs, inputs, device, compiled), x, rounds, (model, part, batch))
    return rows


def whole(model: str, batch: int, rounds: int, device: str) -> list[Row]:
    """A model and its quantized forms, with the ratio that its layers alone let one foresee."""
    torch.manual_seed(0)
    teacher = models.build(model, image_size=WHOLE[model], num_classes=10).eval().to(device)
    images = torch.randn(batch, 3, WHOLE[model], WHOLE[model], device=device)
    builders: dict[str, Callable[[], nn.Module]] = {
        "ours_dynamic": lambda: quantize_model(teacher, Scheme(), activations="dynamic"),
    }
    if device == "cpu":
        builders["torch_dynamic"] = lambda: torch_dynamic_model(teacher)
    forms = {name: build() for name, build in builders.items()}
    foreseen = {}
    if device == "cpu":  # a forecast's clocks do not wait for a GPU
        foreseen = {name: speed_forecast(teacher, form, images, rounds) for name, form in forms.items()}
    rows = time_forms({"fp32": teacher, **forms}, images, rounds, (model, "whole", batch))
    return [
        Row(
            **{
                **asdict(row),
                "predicted_ratio": foreseen[row.form].latency_ratio,
                "linear_share": foreseen[row.form].share,
            }
        )
        if row.form in foreseen
        else row
        for row in rows
    ]


def say_rows(rows: list[Row]) -> None:
    """Print a table of one layer or model."""
    print(f"\n{rows[0].model}, {rows[0].part}, batch {rows[0].batch}")
    for row in rows:
        foreseen = "" if row.predicted_ratio is None else (
            f"   predicted {row.predicted_ratio:.2f} (linear layers: {row.linear_share:.0%} of the teacher's time)"
        )  # fmt: skip
        print(
            f"  {row.form:<28}{1e3 * row.seconds:9.3f} ms  {row.ratio:6.2f} "
            f"[{row.ratio_low:.2f}, {row.ratio_high:.2f}]{foreseen}",
            flush=True,
        )


def main(
    rounds: int = 20,
    threads: int = 1,
    batches: tuple[int, ...] = (1, 8),
    layers_of: tuple[str, ...] = tuple(WIDTHS),
    whole_models: tuple[str, ...] = tuple(WHOLE),
    device: str = "cpu",
    compile: bool = False,  # noqa: A002 - the flag's name
    out: str = "",
) -> None:
    """Measure, print and keep.

    Args:
        rounds: answers of each form.
        threads: of torch on the CPU.
        batches: images at once.
        layers_of: models whose layers are timed: vit_tiny, vit_s_16, vit_b_16.
        whole_models: models that are timed as a whole: vit_tiny, vit_ti_16, vit_s_16.
        device: cpu or cuda.
        compile: torch.compile's forms too; each takes some seconds to be made.
        out: JSON file; nothing is written where it is empty.
    """
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise SystemExit(f"--device takes cpu, or cuda where torch sees a CUDA GPU, but {device!r} was received.")
    torch.set_num_threads(threads)
    rows: list[Row] = []
    for batch in batches:
        for model in layers_of:
            found = layers(model, batch, rounds, device, compile)
            for part in dict.fromkeys(row.part for row in found):
                say_rows([row for row in found if row.part == part])
            rows += found
        for model in whole_models:
            found = whole(model, batch, rounds, device)
            say_rows(found)
            rows += found
    if out:
        environment = {
            "torch": torch.__version__,
            "threads": threads,
            "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "load_average": os.getloadavg()[0],
        }
        Path(out).write_text(json.dumps({"environment": environment, "rows": [asdict(row) for row in rows]}, indent=2))


if __name__ == "__main__":
    import tyro  # gpu_units.py uses what is above, where nothing else needs tyro

    tyro.cli(main)
