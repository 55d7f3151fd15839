"""Published tables: each row follows from its own formula, exclusions have names, a broken file is refused."""

from pathlib import Path

import pytest

from dlojz.base.errors import LabError
from dlojz.hardware import CLUSTERS, cluster
from dlojz.hardware.decoder_size import DecoderSize, Formula, flops_per_sequence
from dlojz.hardware.evidence import FILES, TABLES, Measurement, measurements, read_table, table

ROWS = {  # all rows, and those that may be used
    "jean-zay-a100": (149, 135),
    "jean-zay-v100": (54, 42),
    "korthikanti-4": (5, 5),
    "korthikanti-5": (9, 9),
    "korthikanti-memory": (28, 28),
    "llama-3": (3, 3),
    "megatron-h100": (6, 6),
    "mt-nlg": (3, 3),
    "nemo-h100": (15, 14),
    "sc21-1": (10, 10),
    "sc21-2": (12, 12),
    "torchtitan": (16, 16),
    "vtrain-multi": (109, 109),
    "mpt-a100": (61, 61),
    "mpt-h100": (70, 70),
    "mpt-h100-fp8": (7, 7),
    "fms-a100": (4, 4),
    "fms-h100": (4, 4),
    "nemo-long": (9, 9),
    "bridge-moe": (6, 6),
}
ALL = measurements()


def row(name: str) -> Measurement:
    return next(one for one in table(name.partition("/")[0]) if one.row == name)


def counted_tflops(one: Measurement, formula: Formula) -> float | None:
    """10¹² operations per second of each GPU that the step's time comes to, by a formula; None without a time."""
    if one.seconds is None or not formula:
        return None
    return one.global_batch * flops_per_sequence(one.size, formula) / (one.seconds * one.gpus * 1e12)


def test_the_tables_are_whole() -> None:
    assert {name: (len(table(name)), sum(one.usable for one in table(name))) for name in TABLES} == ROWS
    assert len({one.row for one in ALL}) == len(ALL)
    assert all(one.cluster in CLUSTERS and len(one.source) > 20 and "{" not in one.source for one in ALL)
    assert all(one.outcome == "ran" or one.step_s is None for one in ALL)


# What rounding leaves: TFLOP/s are printed with two decimals or as whole numbers, the V100 rows count with the size
# that they print ("18B" for 18.4), and seconds of the NeMo rows come from whole tokens/s.
ROUNDING = {"jean-zay-a100": 0.007, "jean-zay-v100": 0.026, "mt-nlg": 0.006, "nemo-h100": 0.01}


@pytest.mark.parametrize("name", TABLES)
def test_each_row_follows_from_its_own_formula(name: str) -> None:
    for one in table(name):
        if one.usable and one.step_s is not None and one.tflops_per_gpu is not None:
            assert counted_tflops(one, one.formula) == pytest.approx(one.tflops_per_gpu, rel=ROUNDING[name]), one.row


def test_each_layout_can_be_dealt_out_and_its_cluster_is_large_enough() -> None:
    for one in ALL:
        if one.usable:
            _is_consistent(one)


def _is_consistent(one: Measurement) -> None:
    assert one.dp * one.tp * one.pp * one.cp == one.gpus <= cluster(one.cluster).num_gpus
    assert one.micro_batches is None or one.micro_batches * one.dp * (one.micro_batch or 0) == one.global_batch
    precise = one.precision in cluster(one.cluster).gpu.peak_flops
    assert precise, f"{one.cluster} has no {one.precision}"
    if one.memory_bytes is not None and one.memory_reading in ("nvidia-smi", "reserved"):
        # Whole GB are printed; nvidia-smi counts the context, which torch does not see.
        assert one.memory_bytes < cluster(one.cluster).gpu.memory_bytes * 1.02
    speed = counted_tflops(one, "model")
    if speed is not None and one.table != "korthikanti-4":
        assert 0 < speed * 1e12 < cluster(one.cluster).gpu.peak_flops[one.precision]


def test_tflops_of_table_1_come_to_the_seconds_of_the_paper() -> None:
    """Computed from the printed TFLOP/s by the paper's own equation, apart from this code."""
    seconds = {"1.7": 3.53, "3.6": 3.70, "39.1": 14.45, "145.6": 24.82, "529.6": 54.08, "1008.0": 102.6}
    for size, expected in seconds.items():
        assert row(f"sc21-1/{size}").seconds == pytest.approx(expected, rel=0.002)
    for size in ("1.7", "18.4", "39.1", "145.6", "1008.0"):
        assert row(f"sc21-1/{size}").size.num_parameters / 1e9 == pytest.approx(float(size), abs=0.06)


@pytest.mark.parametrize("one", table("sc21-2"), ids=lambda one: one.row)
def test_days_of_table_2_follow(one: Measurement) -> None:
    days = int(one.note.split()[0])
    steps = 300e9 / (one.global_batch * one.size.sequence_length)
    assert one.seconds is not None and one.seconds * steps / 86400 == pytest.approx(days, abs=1.0)


@pytest.mark.parametrize(("name", "mfu"), [("22B", 41.5), ("175B", 51.4), ("530B", 56.0), ("1T", 56.3)])
def test_shares_of_the_peak_of_korthikanti_follow(name: str, mfu: float) -> None:
    speed = counted_tflops(row(f"korthikanti-5/{name}-selective"), "model")
    assert speed is not None and 100 * speed / 312 == pytest.approx(mfu, abs=0.25)


def test_one_layer_is_the_sum_of_its_passes() -> None:
    for one in table("korthikanti-4"):
        assert one.forward_s is not None and one.backward_s is not None
        assert one.step_s == pytest.approx(one.forward_s + one.backward_s, abs=1.01e-4)  # each rounded to 0.1 ms


@pytest.mark.parametrize("name", ["22B", "175B", "530B", "1T"])
def test_activations_of_korthikanti_follow_from_its_table_2(name: str) -> None:
    """Bytes of a layer, times the layers in flight on the first stage; the figures are digits of a plot."""
    for kind, stored in (("none", lambda t, ratio: 10 + 24 / t + ratio / t), ("selective", lambda t, _: 34 / t)):
        one = row(f"korthikanti-memory/1-{name}-{kind}")
        size, chunks = one.size, one.chunks
        ratio = 5 * size.heads * size.sequence_length / size.hidden
        layer = size.sequence_length * (one.micro_batch or 0) * size.hidden * stored(one.tp, ratio)
        in_flight = size.layers * (1 + (one.pp - 1) / (one.pp * chunks) if chunks > 1 else 1)
        assert one.memory_bytes == pytest.approx(layer * in_flight, rel=0.01)


def test_mpt_sizes_have_the_parameters_that_their_table_prints() -> None:
    printed = {"125m-2048-8": 125311488, "13b-32768-8": 13011240960, "70b-2048-64": 64862437376}
    for name, number in printed.items():
        assert row(f"mpt-a100/{name}").size.num_parameters == number
    assert [len(table(name)) for name in ("mpt-a100", "mpt-h100", "mpt-h100-fp8")] == [61, 70, 7]


def test_out_of_memory_rows_are_there() -> None:
    lost = {one.row.partition("/")[2] for one in table("jean-zay-a100") if one.outcome == "oom"}
    assert lost == {"793", "806", "807", "917", "918", "957"}


def test_known_faults_of_the_tables_are_named() -> None:
    for line in (658, 660, 669, 670, 775):
        assert not row(f"jean-zay-a100/{line}").usable
    assert row("jean-zay-a100/634").memory_bytes is None and row("jean-zay-a100/635").memory_bytes == 56e9
    assert row("jean-zay-a100/648").dp == 4
    assert row("vtrain-multi/15").usable and row("vtrain-multi/15").pp == 1
    assert "needs 32 GPUs" in row("jean-zay-v100/megatron-18B-pp8-mbs4-B256-0526").excluded
    swapped, same = row("jean-zay-a100/669"), row("jean-zay-a100/608")
    assert (swapped.step_s, swapped.tflops_per_gpu) == (same.tflops_per_gpu, same.step_s)


def test_the_four_days_of_one_layout_differ_by_a_factor() -> None:
    days = [one.step_s or 0 for one in table("jean-zay-v100") if "52B-pp16-mbs4-B1024" in one.row]
    assert len(days) == 4 and max(days) / min(days) == pytest.approx(1.8)


def test_sizes_are_those_of_the_published_models() -> None:
    gpt3 = DecoderSize(96, 12288, 96, 51200, 2048)
    h, layers = 12288, 96
    formula = 12 * layers * h**2 * (1 + 13 / (12 * h) + (51200 + 2048) / (12 * layers * h))
    assert gpt3.num_parameters - 2 * h == pytest.approx(formula, rel=1e-12)
    assert row("nemo-h100/LLAMA3-8B-8").size.num_parameters == 8_030_261_248
    assert row("nemo-h100/LLAMA3-70B-64").size.num_parameters == 70_553_706_496
    assert row("llama-3/8192-gpus").size.num_parameters == 405_853_388_800


def test_formulas_are_those_of_the_papers() -> None:
    size, s, h, layers, vocabulary = DecoderSize(40, 6144, 48, 51200, 2048), 2048, 6144, 40, 51200
    shares = s / (6 * h), vocabulary / (16 * layers * h), vocabulary / (12 * layers * h)
    common = s * layers * h**2
    assert flops_per_sequence(size, "recompute") == pytest.approx(96 * common * (1 + shares[0] + shares[1]), rel=1e-12)
    assert flops_per_sequence(size, "model") == pytest.approx(72 * common * (1 + shares[0] + shares[2]), rel=1e-12)
    half = flops_per_sequence(size, "model") - flops_per_sequence(size, "causal")
    assert half == 6 * layers * s**2 * h
    with pytest.raises(LabError, match="unknown formula 'guess'"):
        flops_per_sequence(size, "guess")  # type: ignore[arg-type]


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(LabError, match="heads must divide hidden, but 100 is no multiple of 3"):
        DecoderSize(2, 100, 3, 1000, 64)
    with pytest.raises(LabError, match="layers must be at least 1, but 0"):
        DecoderSize(0, 96, 3, 1000, 64)
    with pytest.raises(LabError, match="unknown positions 'relative'"):
        DecoderSize(2, 96, 3, 1000, 64, positions="relative")  # type: ignore[arg-type]


FIRST = "line 19, row 1.7:"


@pytest.mark.parametrize(
    ("old", "new", "refused"),
    [
        ("1.7,24,2304", "1.7,many,2304", f"{FIRST} heads must be a whole number, but 'many' was received: correct"),
        ("32,32,512", "32,64,512", f"{FIRST} dp × tp × pp × cp is 32, but there are 64 GPUs: correct the layout, or"),
        ("512,16,137", "512,12,137", f"{FIRST} 32 replicas × micro-batch 12 do not divide the batch of 512"),
        ("512,16,137", "512,16,-137", f"{FIRST} tflops_per_gpu must be a number greater than 0, but '-137'"),
        ("16,137", "16,nan", f"{FIRST} tflops_per_gpu must be a number greater than 0, but 'nan' was received"),
        ("16,137", "16,0", f"{FIRST} tflops_per_gpu .* or write - if the source prints none"),
        ("1.7,24,2304,24", "1.7,24,2304", "line 19: 12 cells are due, but 11 are there"),
        ("3.6,32", "1.7,32", "line 20: the row sc21-1/1.7 was there before"),
        ("row,heads,hidden", "row,heads,hiden", "line 18: unknown column 'hiden': did you mean 'hidden'"),
        ("#: precision = fp16\n", "", "line 18, row 1.7: precision is missing: fill in its cell"),
        ("#: engine = megatron", "#: engine = megaton", f"{FIRST} unknown engine 'megaton': did you mean 'megatron'"),
        ("#: engine", "#: motor", "line 11: unknown key 'motor'"),
        ("2304", "2305", f"{FIRST} heads must divide hidden, but 2305"),
        ("1.7,24,2304,24", "1.7,,2304,24", f"{FIRST} heads is missing"),
        ("1.7,24,2304,24,1,1,32,32", "1.7,24,2304,24,1,1,0,32", f"{FIRST} dp must be at least 1, but 0"),
        ("512,16,137", "512,0,137", f"{FIRST} micro_batch must be at least 1, but 0"),
        ("8,16,15,1920", "8,160,15,19200", "line 26, row 310.1: pp × chunks is 160, but there are 96 layers"),
        ("= selene", "= selenes", f"{FIRST} unknown cluster 'selenes': did you mean 'selene'"),
        ("#: engine", "#: ep = 3\n#: engine", "line 20, row 1.7: ep is 3, which does not divide the 32 ranks of tp"),
        ("#: engine", "#: zero_shards = 5\n#: engine", "line 20, row 1.7: zero_shards is 5, which does"),
        ("torch = 1.8", "torch = 1.x", f"{FIRST} torch must be a version such as 2.1, but '1.x' was received"),
        ("assumed = torch", "assumed = torches", f"{FIRST} assumed must be names, with commas .* 'torches"),
        ("#: engine", "#: tensor_overlap = yes\n#: engine", "line 21, row 3.6: tensor_overlap is yes, but sequence"),
        ("= full", "= none\n#: checkpointed_every = 2", "line 20, row 1.7: checkpointed_every is 2, but checkpointing"),
        ("142,", "142,1f1b1f1b", "line 21, row 7.5: unknown schedule '1f1b1f1b'"),
        ("1.7,24", ",24", "line 19: row is missing"),
        ('1.7,24', '"1.7,24', "line "),
    ],
)  # fmt: skip
def test_a_broken_file_is_refused_with_its_line(tmp_path: Path, old: str, new: str, refused: str) -> None:
    text = FILES["sc21-1"].read_text(encoding="utf-8")
    path = tmp_path / "table-sc21-1.csv"
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(LabError, match=f"table-sc21-1.csv, {refused}"):
        read_table(path)


def test_files_that_hold_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="none.csv cannot be read"):
        read_table(tmp_path / "none.csv")
    empty = tmp_path / "empty.csv"
    empty.write_text("row,heads\n", encoding="utf-8")
    with pytest.raises(LabError, match="empty.csv holds no row"):
        read_table(empty)
    with pytest.raises(LabError, match="unknown table 'sc21'"):
        table("sc21")


def test_tables_of_tokens_per_second_come_to_their_seconds() -> None:
    """Of FSDP with torch.compile and of mixtures: seconds are tokens of a step over the printed rate of all GPUs."""
    for name in ("fms-a100", "fms-h100", "bridge-moe"):
        for one in table(name):
            rate = int(one.note.split()[0])
            assert one.seconds == pytest.approx(one.global_batch * 4096 / (rate * one.gpus), rel=1e-5), one.row
    # 549 TFLOP/s of 256 GPUs on 16 sequences of 262,144 tokens: 72 s l h² (1 + 2s/(…)), by the model's own matrices.
    tokens, weights = 262144, 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000
    flops = 16 * (6 * tokens * weights + 12 * 32 * 4096 * tokens**2)
    assert row("nemo-long/256k").seconds == pytest.approx(flops / (549e12 * 256))
    assert [one.size.num_parameters // 10**8 for one in table("bridge-moe")][::2] == [305, 305, 2350]
