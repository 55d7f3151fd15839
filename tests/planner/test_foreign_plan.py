"""Configurations of other programs, weighed and timed: beside published runs, and changed in their own syntax."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlojz.base.language import use_language
from dlojz.cli.main import DONE, FAILED, main
from dlojz.config.foreign_configs.foreign_meaning import ForeignConfig, foreign_run, read_foreign
from dlojz.config.run_config import RunConfig
from dlojz.hardware import cluster
from dlojz.hardware.evidence import measurements
from dlojz.planner.ask import ForeignPlan, plan_foreign
from dlojz.prediction.forecast import heaviest
from tests.config.test_foreign_configs import FILES, MEANT

# File → the row of the published tables that it is.
MEASURED = {
    "sc21-145b.txt": "sc21-1/145.6",
    "korthikanti-22b.txt": "korthikanti-5/22B-full",
    "korthikanti-175b.txt": "korthikanti-5/175B-selective",
    "korthikanti-1t.txt": "korthikanti-5/1T-selective",
    "nemo-llama2-7b.yaml": "nemo-h100/LLAMA2-7B-8",
    "nemo-llama2-70b.yaml": "nemo-h100/LLAMA2-70B-64",
    "nemo-gpt3-175b.yaml": "nemo-h100/GPT3-175B-128",
    "titan-8b-fsdp8.txt": "torchtitan/8B-fsdp8-eager",
    "titan-8b-fsdp128.txt": "torchtitan/8B-fsdp128-compile",
    "titan-70b-tp8.txt": "torchtitan/70B-fp8-async",
    "bloom-176b.slurm": "jean-zay-a100/948",
}
MEMORY_ERROR = 0.07


def planned(path: Path, site: str, **overrides: Any) -> tuple[ForeignConfig, ForeignPlan]:
    config = read_foreign(path)
    return config, plan_foreign(config, foreign_run(config, **overrides), cluster(site))


@pytest.mark.parametrize("name", MEASURED)
def test_plan_foreign_has_the_published_step_in_its_interval(name: str, tmp_path: Path) -> None:
    row = next(row for row in measurements() if row.row == MEASURED[name])
    (tmp_path / name).write_text(FILES[name], encoding="utf-8")
    _, plan = planned(tmp_path / name, row.cluster, **MEANT[name][1])
    assert plan.choice is not None and plan.choice.interval_s is not None
    assert plan.layout.world_size == row.gpus
    assert plan.choice.candidate.global_batch == row.global_batch
    low, high = plan.choice.interval_s
    assert low <= (row.seconds or 0) <= high
    if row.memory_bytes is not None:
        assert plan.choice.memory_bytes == pytest.approx(row.memory_bytes, rel=MEMORY_ERROR)


def merged(base: Any, change: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(change, dict):
        return change
    return base | {key: merged(base.get(key), value) for key, value in change.items()}


@pytest.mark.parametrize("name", ["sc21-145b.txt", "titan-8b-fsdp128.txt", "ds-batch.json", "nemo-llama2-70b.yaml"])
def test_changes_of_plan_foreign_are_lines_of_the_file(name: str, tmp_path: Path) -> None:
    """Written into the file, each change is read as the layout that it promises."""
    site = {"titan-8b-fsdp128.txt": "grand_teton_96", "nemo-llama2-70b.yaml": "dgx_h100"}.get(name, "selene")
    path = tmp_path / name
    path.write_text(FILES[name], encoding="utf-8")
    _, plan = planned(path, site, **MEANT[name][1])
    assert 1 <= len(plan.changes) <= 3
    for change, lines in plan.changes:
        text = FILES[name]
        if path.suffix == ".txt":
            text += " " + " ".join(line for line in lines if not line.startswith("#"))
        else:
            content = yaml.safe_load(text)
            for line in lines:
                content = merged(content, yaml.safe_load(line if path.suffix == ".yaml" else "{" + line + "}"))
            text = json.dumps(content)
        path.write_text(text, encoding="utf-8")
        again = foreign_run(read_foreign(path), **MEANT[name][1])
        for field in (*change.changed, "dp", "micro_batches"):
            assert again.layout[field] == getattr(change.to, field), (field, lines)
        path.write_text(FILES[name], encoding="utf-8")


def test_plan_from_prints_keys_figures_and_changes_in_both_languages(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "pretrain_gpt.sh"
    text = FILES["gpt3-175b.sh"].replace("-size 16\n", "-size 8\n").replace("--fp16", "--fp16 --no-such-key 3")
    path.write_text(text, encoding="utf-8")
    for name, words in {
        "en": (
            "taken (",
            "unknown (1)",
            "without effect here (",
            "fullest GPU",
            "Cheapest changes",
            "--sequence-parallel",
        ),
        "fr": ("prises en compte (", "inconnues (1)", "sans effet ici (", "le plus rempli", "moins chers", "Supposé"),
    }.items():
        use_language(name)
        assert main(["plan", "--from", str(path), "--gpus", "64", "--cluster", "selene"]) == DONE
        out = capfd.readouterr().out
        assert [word for word in words if word not in out] == []


def test_plan_from_gives_json_and_says_what_does_not_start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpt.sh"
    path.write_text(FILES["gpt3-175b.sh"], encoding="utf-8")
    assert main(["plan", "--from", str(path), "--gpus", "64", "--json"]) == FAILED
    document = json.loads(capfd.readouterr().out)
    assert document["program"] == "megatron" and document["plan"] is None
    assert "world size is not divisible" in document["run"]["failures"][0]
    assert main(["plan", "--from", str(path), "--why", "tp=8"]) != DONE
    assert "--why does not go with --from" in capfd.readouterr().err


def test_memory_from_weighs_what_is_traced_and_points_to_plan_else(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "args.json"
    path.write_text(FILES["trainer-args.json"].replace("gpt2-xl", "gpt2_tiny").replace("1024", "64"), encoding="utf-8")
    assert main(["memory", "--from", str(path), "--json"]) == DONE
    document = json.loads(capfd.readouterr().out)
    config = document["config"]
    assert document["from"]["program"] == "trainer" and document["from"]["run"]["gpus"] == 8
    assert (config["model"], config["precision"], config["sequence_length"]) == ("gpt2_tiny", "bf16", 64)
    assert {name: config["layout"][name] for name in ("dp", "micro_batch", "micro_batches")} == {
        "dp": 8, "micro_batch": 4, "micro_batches": 2,
    }  # fmt: skip
    (tmp_path / "gpt.txt").write_text(FILES["korthikanti-22b.txt"], encoding="utf-8")
    assert main(["memory", "--from", str(tmp_path / "gpt.txt"), "--gpus", "8"]) != DONE
    assert "dlojz plan --from gpt.txt" in capfd.readouterr().err
    # States sharded within each of two replicas are in the closed form alone.
    hybrid = FILES["titan-8b.toml"].replace("replicate_degree = 1", "replicate_degree = 2")
    (tmp_path / "hybrid.toml").write_text(hybrid, encoding="utf-8")
    assert main(["memory", "--from", str(tmp_path / "hybrid.toml"), "--gpus", "8"]) != DONE
    assert "dlojz plan --from hybrid.toml" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "precision"), [("axolotl-70b-qlora.yaml", "bf16-true"), ("llamafactory-8b-lora.yaml", "bf16")]
)
def test_plan_foreign_of_adapters_has_the_bytes_of_their_run(name: str, precision: str, tmp_path: Path) -> None:
    """One memory, of `dlojz plan --from` and `dlojz memory --from`: of a model of 1 MB what is beside the context."""
    (tmp_path / name).write_text(FILES[name].replace("bf16: auto", "bf16: true"), encoding="utf-8")
    tiny = f"hf:{Path(__file__).parents[1] / 'models' / 'tiny_llama'}"
    config = read_foreign(tmp_path / name)
    run = foreign_run(config, gpus=2, model=tiny, sequence_length=32)
    plan = plan_foreign(config, run, cluster("jean_zay_a100"))
    assert plan.choice is not None and plan.question.run_precision == run.run_fields()["precision"] == precision
    told = heaviest(RunConfig.of(**run.run_fields(), device="cuda"), plan.question.cluster.gpu).memory
    outside = plan.choice.memory["reserve"]
    assert plan.choice.memory_bytes - outside == pytest.approx((told.needed_bytes or 0) - outside, rel=0.05)
