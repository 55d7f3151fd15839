"""GPUs and clusters: every constant with unit, source, date and standing; a file that lacks one is refused."""

import re
from pathlib import Path

import pytest

from dlojz import hardware
from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.hardware import CLUSTERS, DEVICES, GPUS, LINKS, STANDINGS, cluster, device, gpu, link
from dlojz.hardware.clusters import FOLDER, machine
from dlojz.hardware.gpus import FOLDER as GPU_FOLDER
from dlojz.hardware.gpus import read_gpu, write_gpu
from dlojz.hardware.links import FOLDER as LINK_FOLDER
from dlojz.hardware.links import read_link, write_link

EVERYTHING = [*map(gpu, GPUS), *map(link, LINKS), *map(cluster, CLUSTERS)]


@pytest.mark.parametrize("described", EVERYTHING, ids=lambda one: f"{type(one).__name__}-{one.name}")
def test_every_constant_says_what_is_known_of_it(described: hardware.Device) -> None:
    assert described.constants and described.title
    for name, constant in described.constants.items():
        assert constant.value > 0 and constant.unit in ("FLOP/s", "B/s", "B", "W", "s", "1", "g/kWh"), name
        assert constant.standing in STANDINGS and len(constant.source) > 3, name
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", constant.date), name


def test_gpus_are_the_devices_and_the_cpu() -> None:
    assert set(GPUS) == {*DEVICES, "cpu"}
    assert all(gpu(name) is DEVICES[name] for name in DEVICES)
    assert gpu("A100 80") is gpu("a100-80") and gpu("h100-80") is gpu("h100")


def test_peaks_are_dense_and_absent_where_there_is_none() -> None:
    assert gpu("v100-32").peak_flops == {"fp32": 15.7e12, "fp16": 125e12}
    assert gpu("a100-80").peak_flops["bf16"] == gpu("a100-40").peak_flops["fp16"] == 312e12
    assert "fp8" not in gpu("a100-80").peak_flops and gpu("h100").peak_flops["fp8"] == 1978.9e12
    assert (gpu("a100-80").num_sms, gpu("h100").num_sms, gpu("v100-16").num_sms) == (108, 132, 80)
    assert gpu("a100-80").memory_bytes_per_s == 2039e9 and gpu("a100-80").tdp_w == 400


def test_jean_zay_is_the_machine_that_jobs_are_sent_to() -> None:
    of_jean_zay = [name for name in CLUSTERS if name.startswith("jean_zay")]
    assert len(of_jean_zay) == 5
    for name in of_jean_zay:
        found = cluster(name)
        sent = machine(name)
        assert found.machine == sent
        assert (found.gpu.name, found.gpus_per_node) == (sent.device, sent.gpus_per_node)
        assert sent.max_nodes <= found.num_nodes and found.carbon_g_per_kwh == 57


def test_a_cluster_may_have_a_gpu_of_its_own() -> None:
    own, usual = cluster("grand_teton_96").gpu, gpu("h100")
    assert own.tdp_w == 500 and usual.tdp_w == 700
    clock = ((500 - 70) / (700 - 70)) ** (1 / 3)  # held at less power, of which 70 W are drawn idle
    for name, peak in usual.peak_flops.items():
        assert own.peak_flops[name] == pytest.approx(clock * peak)
    for name, rate in usual.attention_flops.items():
        assert own.attention_flops[name] == pytest.approx(clock * rate)
    assert own.memory_bytes > usual.memory_bytes
    assert cluster("grand-teton 96") is cluster("grand_teton_96")


def test_the_template_is_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text((FOLDER / "template.toml").read_text(encoding="utf-8"), encoding="utf-8")
    assert cluster(path).name == "mine" and cluster(str(path)).num_gpus == 32
    assert "template" not in CLUSTERS


@pytest.mark.parametrize(
    ("old", "new", "refused"),
    [
        (r"(?m)^pue = .*\n", "", r"mine\.toml: the constant pue is missing"),
        (r'unit = "B"', 'unit = "GiB"', "host_memory must be given in B, but its unit is 'GiB'"),
        (r"value = 25e9", "value = -25e9", "nic_bandwidth must be greater than 0, but -25000000000.0 was received"),
        (r"value = 25e9", "value = nan", "nic_bandwidth must be greater than 0, but nan"),
        (r"value = 25e9", 'value = "25e9"', "nic_bandwidth must be greater than 0, but '25e9'"),
        (r"value = 1\.2", "value = 0.5", "pue must be at least 1, but 0.5"),
        (r'standing = "published"', 'standing = "sure"', "unknown nic_bandwidth.standing 'sure'"),
        (r', date = "[^"]*"', "", r"nic_bandwidth\.date is missing"),
        (r'gpu = "a100-80"', 'gpu = "a100-90"', "unknown GPU 'a100-90': did you mean 'a100-80'"),
        (r'intra = "nvlink3"', 'intra = "nvlink33"', "unknown link 'nvlink33'"),
        (r"(?m)^num_nodes = .*\n", "num_nodes = 0\n", "num_nodes must be a whole number of at least 1, but 0"),
        (r"(?m)^gpu = ", 'machine = "mine"\ngpu = ', r"machine is no key any more: .* a table \[slurm\] here"),
        (r"gpus_per_node", "gpu_per_node", "unknown key 'gpu_per_node': did you mean 'gpus_per_node'"),
        (r"# \[own_gpu\].*", "own_gpu = 3", "own_gpu must be a table, but 3"),
        (r"(?s).*", "= no toml", "the hardware file mine.toml cannot be read"),
    ],
)
def test_a_faulty_file_is_refused_in_one_sentence(tmp_path: Path, old: str, new: str, refused: str) -> None:
    text = (FOLDER / "template.toml").read_text(encoding="utf-8")
    path = tmp_path / "mine.toml"
    changed = re.sub(old, new, text, count=1)
    assert changed != text
    if "own_gpu" in new:  # what follows the last table would be read as its own
        changed = f"{new}\n" + text
    path.write_text(changed, encoding="utf-8")
    with pytest.raises(LabError, match=refused):
        cluster(path)


def test_faulty_gpu_and_link_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a100-80.toml"
    text = (GPU_FOLDER / "a100-80.toml").read_text(encoding="utf-8")
    path.write_text(text.replace('unit = "FLOP/s"', 'unit = "TFLOP/s"', 1), encoding="utf-8")
    with pytest.raises(LabError, match=r"peak\.fp32 must be given in FLOP/s, but its unit is 'TFLOP/s'"):
        read_gpu(path)
    path.write_text(text.split("[peak]")[0], encoding="utf-8")
    with pytest.raises(LabError, match=r"a100-80\.toml: the constant peak is missing"):
        read_gpu(path)
    path = tmp_path / "wire.toml"
    text = (LINK_FOLDER / "nvlink3.toml").read_text(encoding="utf-8")
    for old, new, refused in (
        ("ranks = [2, 4, 8]", "ranks = [2, 4]", r"all_reduce\.alpha needs as many values as ranks"),
        ("ranks = [2, 4, 8]", "ranks = [4, 2, 8]", "ranks that grow from 2 on"),
        ("[p2p]", "[point]", "unknown key 'point'"),
        ("4.6e-05", "0", r"all_reduce\.alpha must be greater than 0, but 0"),
    ):
        path.write_text(text.replace(old, new, 1), encoding="utf-8")
        with pytest.raises(LabError, match=refused):
            read_link(path)


def test_unknown_names_are_refused_with_those_there_are() -> None:
    with pytest.raises(LabError, match=r"unknown cluster 'jean_zay_a1000': did you mean 'jean_zay_a100'\?"):
        cluster("jean_zay_a1000")
    with pytest.raises(LabError, match="unknown GPU 'gaudi3'.*legal values: .*v100-32"):
        gpu("gaudi3")
    with pytest.raises(LabError, match="there is no hardware file 'nowhere/mine.toml'"):
        cluster("nowhere/mine.toml")
    use_language("fr")
    with pytest.raises(LabError, match="il n’y a pas de fichier"):
        cluster("nowhere/mine.toml")


ONES_OWN = """title = "Card"
memory = {{ value = 24e9, unit = "B", {source} }}
memory_bandwidth = {{ value = 1e12, unit = "B/s", {source} }}
multiprocessors = {{ value = 80, unit = "1", {source} }}
pass_bandwidth = {{ value = 0.9e12, unit = "B/s", {source} }}
[peak]
fp32 = {{ value = 20e12, unit = "FLOP/s", {source} }}
bf16 = {{ value = 100e12, unit = "FLOP/s", {source} }}
fp8 = {{ value = 200e12, unit = "FLOP/s", {source} }}
[attention]
flash2_forward_128 = {{ value = 60e12, tokens = 4096, unit = "FLOP/s", {source} }}
[products.bf16]
sizes = [
    [4096, 4096, 4096],
    [8192, 8192, 8192],
]
values = [0.75, 0.8]
unit = "1"
source = "here"
date = "2026-11-30"
standing = "measured"
""".format(source='source = "here", date = "2026-11-30", standing = "measured"')


def test_a_gpu_file_of_ones_own_is_found_by_name_and_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gpus" / "card.toml"
    path.parent.mkdir()
    path.write_text(ONES_OWN, encoding="utf-8")
    with pytest.raises(LabError, match="unknown GPU 'card'"):
        gpu("card")
    monkeypatch.setenv("DLOJZ_HARDWARE", str(tmp_path))
    card = gpu("Card")
    assert card == gpu(str(path)) == device("card") and card.title == "Card"
    assert card.product_flops == {"bf16": {(4096, 4096, 4096): 75e12, (8192, 8192, 8192): 80e12}}
    assert card.left_out == (
        "thermal_design_power",
        "idle_power",
        "cublas_workspace",
        "context",
        "kernel_s",
        "launch_s",
    )
    assert card.context_bytes == gpu("h100").context_bytes == device("24GiB").context_bytes and card.kernel_s == 3.1e-6
    assert "cublas_workspace, context of Card were not measured" in card.default_words and not gpu("h100").default_words
    # 60 TFLOP/s at 4096 tokens are 4352/4096 of it at long sequences, for both sizes of head.
    assert card.attention_rates("flash2_forward") == (pytest.approx(63.75e12), pytest.approx(63.75e12))
    assert card.attention_rates("cudnn_forward") == (None, None)
    cluster_path = tmp_path / "mine.toml"
    template = (FOLDER / "template.toml").read_text(encoding="utf-8")
    cluster_path.write_text(template.replace('gpu = "a100-80"', 'gpu = "gpus/card.toml"'), encoding="utf-8")
    assert cluster(cluster_path).gpu == card


def test_the_gpu_file_of_the_documentation_is_one(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "instructors.md").read_text(encoding="utf-8")
    path = tmp_path / "card.toml"
    path.write_text(page.split("```toml\n")[1].split("```")[0], encoding="utf-8")
    assert gpu(str(path)).product_flops["bf16"][4096, 4096, 4096] == 75e12


def test_write_gpu_is_read_again(tmp_path: Path) -> None:
    for name in ("h100", "mi300x", "b200", "t4"):
        write_gpu(tmp_path / f"{name}.toml", gpu(name))
        assert read_gpu(tmp_path / f"{name}.toml") == gpu(name)


def test_write_link_is_read_again(tmp_path: Path) -> None:
    shipped = link("nvlink4")
    write_link(tmp_path / "nvlink4.toml", shipped, "a test", "2026-11-30")
    written = link(str(tmp_path / "nvlink4.toml"))
    assert (written.alpha, written.bandwidth) == (shipped.alpha, shipped.bandwidth)


@pytest.mark.parametrize(
    ("old", "new", "refused"),
    [
        ("bf16 = { value = 100e12", "bf16 = { value = 300e12",
         r"line 8: peak\.bf16 is at most peak\.fp8, 2e\+14 FLOP/s, but 3e\+14 was received"),
        ("bf16 = { value = 100e12", "bf16 = { value = 1e12", r"line 7: peak\.fp32 is at most peak\.bf16, 1e\+12"),
        ("value = 1e12", "value = 0", "line 3: memory_bandwidth must be greater than 0, but 0 was received"),
        ("value = 1e12", "value = nan", "line 3: memory_bandwidth must be greater than 0, but nan"),
        ("value = 24e9", 'value = "24 GB"', "line 2: memory must be greater than 0, but '24 GB'"),
        ("value = 80", "value = 80.5", r"line 4: multiprocessors is a whole number, but 80\.5"),
        ("0.9e12", "1.1e12", r"line 5: pass_bandwidth is at most memory_bandwidth, 1e\+12 B/s, but 1\.1e\+12"),
        ("flash2_forward", "flash5_forward", "line 11: unknown key 'flash5_forward_128'"),
        ("tokens = 4096", "tokens = 0", r"line 11: attention\.flash2_forward_128\.tokens must be a whole number"),
        ("[0.75, 0.8]", "[0.7]", r"line 12: products\.bf16 needs as many values as sizes"),
        ("[0.75, 0.8]", "[0.7, 1.2]", r"line 12: products\.bf16 is at most peak\.bf16, 1e\+14 FLOP/s, but 1\.2e\+14"),
        ("[8192, 8192, 8192]", "[4096, 4096, 4096]", r"line 13: products\.bf16\.sizes holds three whole numbers"),
        ("[products.bf16]", "[products.int8]", "line 12: unknown key 'int8'"),
        ("bf16 = { value = 100e12", "int4 = { value = 100e12", "line 8: unknown key 'int4'"),
        ("multiprocessors", "sms", "line 4: unknown key 'sms'"),
        ("multiprocessors", "# multiprocessors", r"card\.toml: the constant multiprocessors is missing"),
        ("[peak]", "[peak", r"card\.toml cannot be read: .*line 6"),
    ],
)  # fmt: skip
def test_a_faulty_gpu_file_is_refused_with_value_and_line(tmp_path: Path, old: str, new: str, refused: str) -> None:
    assert old in ONES_OWN
    path = tmp_path / "card.toml"
    path.write_text(ONES_OWN.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(LabError, match=refused):
        gpu(str(path))
