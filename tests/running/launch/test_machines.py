"""Machine files: those that are shipped, what is refused in one, which one is chosen; and `dlojz machines`."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import dlojz
from dlojz.base.errors import LabError
from dlojz.cli.main import main
from dlojz.config.run_config import RunConfig
from dlojz.hardware.clusters import (
    FOLDER,
    Machine,
    choose,
    cluster,
    cluster_name,
    here,
    machine,
    machine_files,
    machine_of,
    read_machine,
)
from dlojz.running.limits import JobRequest, allocate, preview

SHIPPED = ("jean_zay_a100", "jean_zay_gpu_p2", "jean_zay_h100", "jean_zay_v100_16", "jean_zay_v100_32", "local")
LEAST = """
title = "t"
gpu = "cpu"
gpus_per_node = 2
num_nodes = 2

[slurm]
source = "s"
date = "2026-01-31"
max_hours = 1
cpus_per_gpu = 2
"""
OF_OLD = """
title = "t"
source = "s"
date = "2026-01-31"
max_hours = 1
max_nodes = 2
gpus_per_node = 2
cpus_per_gpu = 2
device = "cpu"
"""


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No cluster, no account and no machine of the one who runs the tests."""
    for name in ("DLOJZ_MACHINE", "DLOJZ_MACHINES", "DLOJZ_ACCOUNT", "IDRPROJ"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


def _least_with(line: str) -> str:
    """The shortest file, with another line where the line of that key stands, else at its end."""
    line = line.replace("[[qos]]", "[[slurm.qos]]")
    key = line.partition(" ")[0]
    text, replaced = re.subn(rf"(?m)^{re.escape(key)} = .*$", lambda _: line, LEAST)
    return text if replaced else f"{LEAST}{line}\n"


def test_machine_files_that_are_shipped_can_be_read() -> None:
    assert tuple(sorted(machine_files())) == SHIPPED
    for name in SHIPPED:
        assert machine(name).name == name


def test_the_template_makes_a_machine_with_all_its_lines_in_force(tmp_path: Path) -> None:
    template = FOLDER / "template.toml"
    assert read_machine(template).max_nodes == 4
    whole = re.sub(r"^# ((?:[a-z_]+ = |[A-Z_]+ = |\[).*)$", r"\1", template.read_text(), flags=re.MULTILINE)
    one = read_machine(written(tmp_path, whole))
    assert one.max_nodes == 2
    assert (one.partition, one.exclusive, one.environment) == ("gpu", True, {"NCCL_DEBUG": "WARN"})
    assert [qos.name for qos in one.qos] == ["normal"]


def test_read_machine_takes_a_file_of_old_with_all_keys_at_the_top(tmp_path: Path) -> None:
    assert read_machine(written(tmp_path, OF_OLD)) == read_machine(written(tmp_path, LEAST))
    with pytest.raises(LabError, match=r"mine.toml is refused: unknown key 'partitoin': did you mean 'partition'"):
        read_machine(written(tmp_path, OF_OLD + "partitoin = 'gpu'"))


def test_read_machine_says_where_a_file_of_plans_alone_says_nothing_of_jobs(tmp_path: Path) -> None:
    for text in (LEAST.partition("[slurm]")[0], (FOLDER / "selene.toml").read_text()):
        with pytest.raises(LabError, match=r"mine.toml: nothing says how jobs are sent there: add a table \[slurm\]"):
            read_machine(written(tmp_path, text))


def test_read_machine_checks_the_whole_file_of_a_cluster(tmp_path: Path) -> None:
    text = (FOLDER / "jean_zay_a100.toml").read_text()
    assert read_machine(written(tmp_path, text)).max_nodes == 52
    with pytest.raises(LabError, match="unknown link 'omni_path_a101'"):
        read_machine(written(tmp_path, text.replace("omni_path_a100", "omni_path_a101")))


def test_machine_of_takes_ones_own_file_of_that_name_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (FOLDER / "jean_zay_a100.toml").read_text()
    ordered = cluster(written(tmp_path, text.replace("max_hours = 20 ", "max_hours = 19 ")))
    assert machine_of(cluster("selene")) is None
    assert machine_of(ordered) is ordered.machine and ordered.machine is not None and ordered.machine.max_hours == 19
    monkeypatch.setenv("DLOJZ_MACHINES", str(tmp_path))
    (tmp_path / "selene.toml").write_text(OF_OLD)
    selene = machine_of(cluster("selene"))
    assert selene is not None and selene.title == "t"


def test_no_site_is_named_in_the_code() -> None:
    for path in (Path(dlojz.__file__).parent / "running").rglob("*.py"):
        assert "jean" not in path.read_text(encoding="utf-8").lower(), path.name


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("partitoin = 'gpu'", "did you mean 'partition'"),
        ("name = 'other'", "unknown key 'name'"),
        ("gpu = 'a100-8'", "did you mean 'a100-80'"),
        ("max_nodes = 0", "max_nodes must be at least 1"),
        ("max_hours = nan", "max_hours"),
        ("partition = 'gpu; rm -rf /'", "partition"),
        ("partition = 'gpu\\n#SBATCH --exclusive'", "partition"),
        ("setup = [['rm', '-rf']]", "unknown setup command 'rm'"),
        ("setup = [['module', 'load', '$(reboot)']]", "no plain word"),
        ("setup = [['module', 'load', 'a;b']]", "no plain word"),
        ("setup = [['source', 'a\\nb']]", "no plain word"),
        ("python = '`x`'", "no plain word"),
        ("torch_module = 'torch; reboot'", "no plain word"),
        ("environment = {'A B' = 'x'}", "a variable's name"),
        ("environment = {A = '$(x)'}", "no plain word"),
        ("qos = 'normal'", "qos is a list"),
        ("[[qos]]\nname = 'q'\nmax_hour = 2", "did you mean 'max_hours'"),
        ("[[qos]]\nmax_hours = 2", "name is missing"),
        ("account_suffix = '@a b'", "account_suffix"),
        ("date = 'yesterday'", "date"),
        ("title = ", "cannot be read"),
    ],
)
def test_read_machine_refuses_in_one_sentence_that_names_the_file(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(LabError) as refusal:
        read_machine(written(tmp_path, _least_with(line)))
    assert words in str(refusal.value)
    assert "mine.toml" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_machine_takes_ones_own_file_first_and_a_damaged_one_hinders_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DLOJZ_MACHINES", str(tmp_path))
    (tmp_path / "local.toml").write_text(LEAST)
    (tmp_path / "broken.toml").write_text("title = 3")
    assert machine("local").title == "t"
    assert main(["machines", "--json"]) == 0
    told = capfd.readouterr()
    assert {one["name"] for one in json.loads(told.out)} == set(SHIPPED)
    assert "broken.toml: nothing says how jobs are sent there" in told.err


def test_choose_takes_the_machine_that_is_named_or_of_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cluster_name() == "" or Path("/etc/slurm/slurm.conf").exists()
    assert choose("local").name == "local"
    with pytest.raises(LabError, match="did you mean 'local'"):
        choose("locl")
    (tmp_path / "slurm.conf").write_text("# ClusterName=other\n ClusterName = lab\n")
    assert choose(None).name == "local"
    monkeypatch.setenv("DLOJZ_MACHINE", "jean_zay_h100")
    assert choose(None).name == "jean_zay_h100"
    monkeypatch.delenv("DLOJZ_MACHINE")
    (tmp_path / "slurm.conf").write_text("ClusterName=unknown\n")
    with pytest.raises(LabError, match="several machines could be meant .* machine='NAME'"):
        choose(None)


def test_choose_takes_the_first_machine_of_the_cluster_on_which_the_run_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names that fit come from a generator: reading them for one candidate leaves none for the next."""
    (tmp_path / "slurm.conf").write_text("ClusterName=lab\n")
    monkeypatch.setenv("DLOJZ_MACHINES", str(tmp_path))
    for name in ("lab_small", "lab_tall", "lab_wide"):
        (tmp_path / f"{name}.toml").write_text(LEAST + 'cluster = "lab"\n')
    candidates = here()
    assert {"lab_small", "lab_tall", "lab_wide"} <= set(candidates)
    assert choose(None, (name for name in candidates[1:])).name == candidates[1]
    assert choose(None, (name for name in candidates[-1:])).name == candidates[-1]
    with pytest.raises(LabError, match="several machines could be meant"):
        choose(None, iter(()))


def of(name: str, config: dict[str, Any], **request: Any) -> tuple[Any, str]:
    asked, refusals = allocate(machine(name), RunConfig.of(**config), JobRequest(**request), environment={})
    return asked, " ".join(refusals)


def test_nodes_hours_and_the_qos() -> None:
    asked, refused = of("jean_zay_v100_32", {"dp": 8, "device": "cuda"}, account="abc@v100", time_limit_s=7201)
    assert refused == ""
    assert (asked.nodes, asked.ranks_per_node, asked.gpus, asked.minutes) == (2, 4, 8, 121)
    assert (asked.qos, asked.account, asked.warning_s) == ("qos_gpu-t3", "abc@v100", 120)
    assert asked.gpu_hours == 8 * 121 / 60
    asked, refused = of("jean_zay_v100_32", {"dp": 8, "device": "cuda"}, account="abc@v100", time_limit_s=21 * 3600)
    assert (asked.qos, refused) == ("qos_gpu-t4", "")
    asked, refused = of("local", {"dp": 1}, time_limit_s=30)
    assert (asked.nodes, asked.ranks_per_node, asked.minutes, asked.warning_s, refused) == (1, 1, 1, 12, "")


@pytest.mark.parametrize(
    ("name", "config", "request_", "words"),
    [
        ("jean_zay_h100", {"dp": 4}, {}, "none is known here: give --account PROJECT@h100"),
        ("jean_zay_h100", {"dp": 4}, {"account": "abc"}, "use account='abc@h100'"),
        ("jean_zay_h100", {"dp": 4}, {"account": "abc@v100"}, "use account='abc@h100'"),
        ("jean_zay_h100", {"dp": 6}, {"account": "a@h100"}, "such as 4 or 8"),
        ("jean_zay_h100", {"dp": 4, "device": "cpu"}, {"account": "a@h100"}, "bills GPUs that would stand idle"),
        ("jean_zay_h100", {"dp": 4}, {"account": "a@h100", "time_limit_s": 101 * 3600}, "gives 100 h at most"),
        ("jean_zay_h100", {"dp": 32}, {"account": "a@h100", "time_limit_s": 21 * 3600}, "fit no QoS"),
        ("jean_zay_h100", {"dp": 4}, {"account": "a@h100", "qos": "qos_gpu-t3"}, "did you mean 'qos_gpu_h100-t3'"),
        (
            "jean_zay_h100",
            {"dp": 4},
            {"account": "a@h100", "qos": "qos_gpu_h100-dev", "time_limit_s": 3 * 3600},
            "beyond the QoS 'qos_gpu_h100-dev': use 'qos_gpu_h100-t3'",
        ),
        ("local", {"dp": 8}, {}, "8 ranks need 4 nodes, but local gives 2 at most"),
        ("local", {"dp": 2, "device": "cuda"}, {}, "have no GPU that computes"),
    ],
)
def test_allocate_refuses_before_anything_is_sent(
    name: str, config: dict[str, Any], request_: dict[str, Any], words: str
) -> None:
    assert words in of(name, config, **request_)[1]


def test_the_account_of_the_project_gets_its_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IDRPROJ", "abc")
    shown = preview(RunConfig.of(dp=4), "jean_zay_a100")
    assert shown.allocation.account == "abc@a100"
    assert shown.refusals == ()
    monkeypatch.setenv("DLOJZ_ACCOUNT", "abc; reboot")
    assert "account" in preview(RunConfig.of(dp=4), "jean_zay_a100").refusals[0]


def test_a_preview_shows_what_a_file_says_letter_by_letter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLOJZ_MACHINES", str(tmp_path))
    written(tmp_path, LEAST.replace('"t"', '"<img src=x onerror=alert(1)>"') + "normalised_hour_factor = 2.0\n")
    shown = preview(RunConfig.of(dp=4), "mine", time_limit_s=3600)
    assert "<img" not in shown._repr_html_()
    assert "&lt;img" in shown._repr_html_()
    assert shown.normalised_hours == 8.0
    assert shown.to_dict()["gpu_hours"] == 4.0


def test_main_machines_lists_allocates_and_writes_the_script(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["machines"]) == 0
    assert "jean_zay_v100_16" in capfd.readouterr().out
    assert main(["machines", "local", "--dp", "4", "--hours", "0.5", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert (told["nodes"], told["gpu_hours"], told["refusals"]) == (2, 2.0, [])
    assert main(["machines", "local", "--dp", "4", "--script"]) == 0
    assert "#SBATCH --nodes=2" in capfd.readouterr().out
    assert main(["machines", "local", "--dp", "8", "--script"]) == 2
    assert "4 nodes" in capfd.readouterr().err
    assert main(["machines", "--dp", "8"]) == 2
    assert "name it" in capfd.readouterr().err
    assert main(["machines", "nowhere"]) == 2
    assert "unknown machine 'nowhere'" in capfd.readouterr().err


def test_a_machine_keeps_what_it_was_made_of() -> None:
    one = machine("local")
    assert Machine.from_json(one.to_json()) == one


@pytest.mark.parametrize("name", ["a100", "gpu_p2", "h100", "v100_16", "v100_32"])
def test_machine_of_jean_zay_has_its_jobs_load_the_module_of_torch_last(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    account = f"abc{machine(f'jean_zay_{name}').account_suffix}"
    words = ["machines", f"jean_zay_{name}", "--dp", "2", "--account", account]
    main([*words, "--script"])
    script = capsys.readouterr().out
    assert script.index("module purge") < script.index("module load pytorch-gpu/") < script.index("srun ")
    main(words)
    assert "module load pytorch-gpu/" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("max_nodes = true", "max_nodes is a number, but True was received."),
        ('max_nodes = "2"', "max_nodes is a number, but '2' was received."),
        ("max_hours = 1e20", "max_hours"),
        ("max_hours = false", "max_hours is a number"),
        ("exclusive = 1", "exclusive is true or false, but 1 was received."),
        ('exclusive = "yes"', "exclusive is true or false"),
        ('partition = ""', "partition is an empty text: leave the line out."),
        ("memory_gib_per_node = true", "memory_gib_per_node is a number"),
        ('[[qos]]\nname = "q"\nmax_hours = 1\nmax_gpus = true', "max_gpus is a number, but True was received."),
        ('[[qos]]\nname = "q"\nmax_hours = 1e20', "max_hours"),
    ],
)
def test_read_machine_refuses_a_value_of_another_type(line: str, told: str, tmp_path: Path) -> None:
    """TOML tells numbers, texts and truth values apart; a queue longer than a year is a slip."""
    with pytest.raises(LabError, match=re.escape(told)):
        read_machine(written(tmp_path, _least_with(line)))
