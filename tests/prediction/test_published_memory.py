"""Figures that others published or measured, against our closed forms; tolerance: the digits printed."""

import importlib
import json
from fractions import Fraction
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from dlojz.prediction.rules_of_thumb import (
    RULES,
    Shape,
    bytes_per_parameter,
    infinity_activation_bytes,
    infinity_activation_working_bytes,
    infinity_checkpoint_bytes,
    layer_bytes,
)

GB, GIB, TIB, MIB = 10**9, 2**30, 2**40, 2**20


def unit(printed: str) -> float:
    """One in the last digit printed; papers round or cut."""
    return 10.0 ** -len(printed.partition(".")[2])


ZERO_TABLE_1 = """
1     120  120  120   2048 2048 2048  16000 16000 16000
4     52.5 41.3 30    896  704  512   7000  5500  4000
16    35.6 21.6 7.5   608  368  128   4750  2875  1000
64    31.4 16.6 1.88  536  284  32    4187  2218  250
256   30.4 15.4 0.47  518  263  8     4046  2054  62.5
1024  30.1 15.1 0.12  513  257  2     4011  2013  15.6
"""


@pytest.mark.parametrize("line", ZERO_TABLE_1.strip().splitlines())
def test_bytes_per_parameter_of_zero_table_1(line: str) -> None:
    """Rajbhandari et al. 2020, table 1: GB per device for 7.5B, 128B and 1T parameters, stages 1, 2, 3."""
    ranks, *cells = line.split()
    for number, printed in enumerate(cells):
        parameters = (7_500_000_000, 128 * GB, 1000 * GB)[number // 3]
        form = bytes_per_parameter("fp16_amp", "adam", zero=number % 3 + 1, dp=int(ranks))
        assert form.device_bytes(parameters) / GB == pytest.approx(float(printed), abs=unit(printed)), (ranks, number)


@pytest.mark.parametrize(
    ("zero", "theory", "measured"),
    [
        (0, (2, 4, 8, 16, 32), (1.3, 2.5, 5, 10, 20)),
        (1, (7.6, 15.2, 30.4, 60.8, 121.6), (6.2, 12.5, 25, 50, 100)),
        (2, (14.4, 28.8, 57.6, 115.2, 230.4), ()),
        (3, (128, 256, 512, 1024, 2048), ()),
    ],
)
def test_bytes_per_parameter_of_zero_table_2(zero: int, theory: tuple[float, ...], measured: tuple[float, ...]) -> None:
    """Table 2: billions of parameters that fit 32 GB on 64·MP devices; each line doubles the rounded one before it."""
    for power, printed in enumerate(theory):
        form = bytes_per_parameter("fp16_amp", "adam", zero=zero, dp=64, tp=2**power)
        fits = float(32 / form.device_per_parameter)
        assert fits == pytest.approx(printed, abs=0.1 * 2**power)
        if measured:
            assert 0.6 * fits < measured[power] < fits


INFINITY_FIGURE_2A = """
0.10    80  10  128   1.83    2.03   0.05  1.56  1.63
0.50    100 20  160   9.16    3.91   0.12  6.25  2.50
1.01    128 25  256   18.31   7.13   0.20  9.77  3.56
10.05   195 64  512   182.81  24.38  0.76  64.0  8.0
101.47  315 160 1024  1845.70 88.59  3.08  400   18.0
"""


@pytest.mark.parametrize("line", INFINITY_FIGURE_2A.strip().splitlines())
def test_zero_infinity_figure_2a(line: str) -> None:
    """Rajbhandari et al. 2021, figure 2a: TiB of activations and checkpoints, GiB of the working memory of
    activations (the 6th, 7th and 9th column); batch 32 per node (4 for the last), sequence 1024."""
    _, layers, thousands, heads, _, activations, checkpoints, _, working = line.split()
    hidden, nl = 1024 * int(thousands), int(layers)
    batch = Shape(1024, 32, hidden, int(heads))
    ours = (
        infinity_activation_bytes(batch, nl) / TIB,
        float(infinity_checkpoint_bytes(batch, nl)) / TIB,
        infinity_activation_working_bytes(Shape(1024, 4, hidden, int(heads))) / GIB,
    )
    for value, printed in zip(ours, (activations, checkpoints, working), strict=True):
        assert value == pytest.approx(float(printed), abs=unit(printed))


KORTHIKANTI = {
    # a, h, L, t, p, b, chunks: states, activations with tensor parallelism alone, with their method (GiB); figure 7 (%)
    "22B": ((64, 6144, 48, 8, 1, 4, 1), (45.5625, 59.25, 9.5625), (66.77, 49.37, 16.14, 7.59)),
    "175B": ((96, 12288, 96, 8, 8, 1, 3), (45.5625, 66.8438, 12.3516), (61.96, 56.52, 18.48, 8.70)),
    "530B": ((128, 20480, 105, 8, 35, 1, 3), (31.6406, 114.0234, 23.0762), (58.33, 61.90, 20.24, 9.52)),
    "1T": ((160, 25600, 128, 8, 64, 1, 1), (32.9590, 131.25, 26.5625), (58.33, 61.90, 20.24, 9.52)),
}


@pytest.mark.parametrize("model", KORTHIKANTI)
def test_layer_bytes_of_korthikanti_figures_1_and_7(model: str) -> None:
    """Korthikanti et al. 2022: s = 2048, the first stage of the pipeline; the bars of figure 1 are formula values."""
    (heads, hidden, layers, tp, pp, batch, chunks), gib, percent = KORTHIKANTI[model]
    shape = Shape(2048, batch, hidden, heads)
    # §4.2.3: L layers' worth in 1F1B, L(1 + (p − 1)/(p·v)) interleaved.
    stage = layers if chunks == 1 else layers * (1 + Fraction(pp - 1, pp * chunks))
    alone = layer_bytes(shape, tp=tp)
    with_sequence = layer_bytes(shape, tp=tp, sequence_parallel=True)
    both = layer_bytes(shape, tp=tp, sequence_parallel=True, checkpointing="selective")
    states = RULES["18"].total_bytes(12 * layers * hidden**2) / (tp * pp)
    for value, printed in zip((states, stage * alone, stage * both), gib, strict=True):
        assert float(value) / GIB == pytest.approx(printed, abs=6e-5)
    ratios = (
        with_sequence,
        layer_bytes(shape, tp=tp, checkpointing="selective"),
        both,
        layer_bytes(shape, tp=tp, checkpointing="full"),
    )
    for value, printed in zip(ratios, percent, strict=True):
        assert float(100 * value / alone) == pytest.approx(printed, abs=0.006)


def deepspeed_estimates(parameters: int, largest: int, gpus: int, nodes: int = 1) -> dict[str, tuple[int, int]]:
    """Host and device bytes by stage and what is offloaded, as DeepSpeed's own functions say."""
    stage_1_and_2 = importlib.import_module("deepspeed.runtime.zero.stage_1_and_2")
    stage3 = importlib.import_module("deepspeed.runtime.zero.stage3")
    two, three = (
        stage_1_and_2.estimate_zero2_model_states_mem_needs,
        stage3.estimate_zero3_model_states_mem_needs,
    )
    return {
        "2": two(parameters, gpus, nodes, cpu_offload=False),
        "2 optimizer": two(parameters, gpus, nodes, cpu_offload=True),
        "3": three(parameters, largest, gpus, nodes, cpu_offload=False, cpu_offload_params=False)[:2],
        "3 optimizer": three(parameters, largest, gpus, nodes, cpu_offload=True, cpu_offload_params=False)[:2],
        "3 parameters": three(parameters, largest, gpus, nodes, cpu_offload=True, cpu_offload_params=True)[:2],
    }


@pytest.mark.parametrize(("gpus", "nodes"), [(4, 1), (8, 1), (2, 2), (8, 8)])
def test_bytes_per_parameter_are_deepspeed_s_estimates_where_it_counts_the_same(gpus: int, nodes: int) -> None:
    """18 bytes, gradients in fp32; it adds 4 bytes for the largest layer, gathered, and half as much host memory."""
    parameters, largest, ranks = 2_851_000_000, 32_000_000, gpus * nodes
    theirs = deepspeed_estimates(parameters, largest, gpus, nodes)

    def ours(zero: int, offload: Any = "none") -> tuple[float, int]:
        form = bytes_per_parameter("bf16_fp32_gradients", "adam", zero=zero, dp=ranks, offload=offload)
        return 1.5 * gpus * float(form.host * parameters), form.device_bytes(parameters)

    layer_bytes_gathered = 4 * largest
    for case, (zero, offload) in {
        "3": (3, "none"),
        "3 optimizer": (3, "optimizer"),
        "3 parameters": (3, "parameters"),
    }.items():
        host_bytes, device_bytes = ours(zero, offload)
        assert theirs[case][1] == pytest.approx(device_bytes + layer_bytes_gathered, abs=1), case
        if offload != "none":
            assert theirs[case][0] == pytest.approx(host_bytes, abs=2), case
    # Stage 2: it counts the gradients of 16 bit too, which a reduction leaves for one bucket at a time.
    assert theirs["2"][1] == pytest.approx(ours(2)[1] + 2 * parameters / ranks, abs=2)
    host_bytes, device_bytes = ours(2, "optimizer")
    assert theirs["2 optimizer"][1] == device_bytes
    # Per node, yet it takes 4 bytes for every GPU of all nodes once there are more than 4: an over-estimate.
    assert theirs["2 optimizer"][0] == pytest.approx(1.5 * parameters * max(4 * ranks, 16))
    if ranks <= 4:
        assert theirs["2 optimizer"][0] == pytest.approx(nodes * host_bytes, abs=2)


def test_deepspeed_s_documented_figures() -> None:
    """DeepSpeed's documentation, "Memory Requirements" ("GB" there is GiB), and what 0.19 prints for T5-3B."""
    t5_3b = deepspeed_estimates(2_851_000_000, 32_000_000, 8)
    printed = {"2": 11.28, "2 optimizer": 5.31, "3": 6.09, "3 optimizer": 0.78, "3 parameters": 0.12}
    assert {case: round(device / GIB, 2) for case, (_, device) in t5_3b.items()} == printed
    assert round(t5_3b["2 optimizer"][0] / GIB, 2) == 127.45
    assert round(t5_3b["3 optimizer"][0] / GIB, 2) == 63.72
    assert round(t5_3b["3 parameters"][0] / GIB, 2) == 71.69
    t5_large = deepspeed_estimates(737_670_000, 32_900_000, 4)
    megabytes = [int(t5_large[case][1] / MIB) for case in ("3", "3 parameters", "3 optimizer")]
    assert megabytes == [3291, 125, 477]


GOLDEN: list[dict[str, Any]] = json.loads(Path(__file__).with_name("megatron_golden.json").read_text(encoding="utf-8"))[
    "rows"
]
WORKSPACES_MIB = {"a100": 2 * 32 + 4, "h100": 2 * 32 + 32}
"""Two cuBLAS handles with CUBLAS_WORKSPACE_CONFIG=:4096:8, and Transformer Engine's: inferred from the sizes."""


def named(row: dict[str, Any]) -> str:
    return f"{row['test']}-{row['gpu']}"


def parameters_per_rank(row: dict[str, Any]) -> int:
    """Megatron's GPT: column- and row-parallel matrices, whole norms, row-parallel biases and position embedding."""
    h, t = row["hidden"], row["tp"]
    queries_keys_values = h + 2 * h * row["kv_heads"] // row["heads"]
    layer = (h + 1) * queries_keys_values // t + h * h // t + h + (4 * h * h + 4 * h) // t + 4 * h * h // t + h + 4 * h
    vocabulary = -(-row["vocabulary"] // (128 * t)) * 128
    return row["layers"] * layer + (1 + row["untied"]) * vocabulary * h + row["sequence"] * h + 2 * h


def states_bytes(row: dict[str, Any]) -> int:
    """Megatron's distributed optimizer is ZeRO-1 with gradients in fp32: 6 + 12/DP."""
    zero = 1 if row["dp"] > 1 else 0
    form = bytes_per_parameter("bf16_fp32_gradients", "adam", zero=zero, dp=row["dp"])
    return form.device_bytes(parameters_per_rank(row))


def peak_beyond_allocated(row: dict[str, Any]) -> Fraction:
    """Layers, and logits in bf16 and fp32: 6·s·b·V/t. With full recomputation the peak is at the loss."""
    shape = Shape(row["sequence"], row["micro_batch"], row["hidden"], row["heads"])
    tp = row["tp"]
    vocabulary = -(-row["vocabulary"] // (128 * tp)) * 128
    logits = Fraction(6 * row["sequence"] * row["micro_batch"] * vocabulary)
    if row["recompute"] == "full":
        return row["layers"] * layer_bytes(shape, checkpointing="full") + max(logits, layer_bytes(shape, tp=tp))
    # A fused kernel keeps no scores, just as if they were recomputed.
    kept = layer_bytes(shape, tp=tp, checkpointing="selective" if row["attention"] == "fused" else "none")
    return row["layers"] * kept + logits


def allocated_bytes(row: dict[str, Any]) -> int:
    """States and workspaces; Megatron's own layers carry 82 to 128 MiB of workspaces that we cannot itemise."""
    if row["implementation"] != "te":
        return int(row["allocated_bytes"])
    return states_bytes(row) + WORKSPACES_MIB[row["gpu"]] * MIB


def test_parameters_per_rank_of_the_golden_runs() -> None:
    assert {row["tp"]: parameters_per_rank(row) for row in GOLDEN if row["layers"] == 12} == {
        1: 64_109_568,
        2: 32_368_640,
        4: 16_498_176,
    }
    assert parameters_per_rank(GOLDEN[0]) == 1_713_299_456


@pytest.mark.parametrize("row", [row for row in GOLDEN if row["implementation"] == "te"], ids=named)
def test_megatron_s_allocated_memory(row: dict[str, Any]) -> None:
    """Within 0.5 % of what was measured, but for two runs whose notes say why."""
    assert allocated_bytes(row) == pytest.approx(row["allocated_bytes"], rel=row.get("allocated_tolerance", 0.005))


def test_megatron_s_first_run_is_explained_to_4_kb() -> None:
    row = next(row for row in GOLDEN if row["tp"] == 1 and row["gpu"] == "a100" and row["attention"] == "fused")
    assert 0 <= row["allocated_bytes"] - allocated_bytes(row) < 4096


def test_layer_bytes_explain_megatron_s_peaks() -> None:
    """Median within 2.5 %, none beyond 5.1 % (tensor parallelism 4 on a small model, fused attention)."""
    errors = {
        named(row): abs(float(allocated_bytes(row) + peak_beyond_allocated(row)) / row["peak_bytes"] - 1)
        for row in GOLDEN
    }
    assert len(GOLDEN) == 11
    assert median(errors.values()) < 0.01, errors
    assert max(errors.values()) < 0.051, errors
