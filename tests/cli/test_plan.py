"""`dlojz plan`: what it prints, writes and refuses; its answer is that of the function."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.cli.main import DONE, FAILED
from dlojz.cli.plan import plan_command
from dlojz.config.run_config import RunConfig
from dlojz.planner.ask import plan

GPT2 = ["gpt2", "--cluster", "jean_zay_a100", "--gpus", "4", "--batch", "32"]
OWN = ["--layers", "12", "--hidden", "768", "--heads", "12", "--vocabulary", "50257", "--sequence-length", "1024"]


def _json(capfd: pytest.CaptureFixture[str], *words: str, code: int = DONE) -> Any:
    assert plan_command([*words, "--json"]) == code
    return json.loads(capfd.readouterr().out)


def test_the_json_is_the_functions_answer(capfd: pytest.CaptureFixture[str]) -> None:
    told = _json(capfd, *GPT2, "--top", "3")
    made = plan("gpt2", "jean_zay_a100", gpus=4, batch=32)
    assert told == json.loads(json.dumps(made.as_dict(3)))
    assert told["best"]["layout"]["gpus"] == 4 and len(told["top"]) == 3 and told["best"]["simulated"]
    config = RunConfig.from_json(told["best"]["documents"]["run_config.json"])
    assert config == made.best.config()


def test_plan_command_takes_sizes_for_a_model(capfd: pytest.CaptureFixture[str]) -> None:
    told = _json(capfd, *OWN, "--gpus", "2,4", "--batch", "32", "--engine", "megatron-core")
    assert told["gpus"] == [2, 4] and told["parameters"] == pytest.approx(124e6, rel=0.02)
    assert {one["layout"]["engine"] for one in told["top"]} == {"megatron-core"}
    assert "--tensor-model-parallel-size" in told["best"]["documents"]["arguments.txt"]


def test_plan_command_shows_the_best_the_front_the_refusals_and_the_tree(capfd: pytest.CaptureFixture[str]) -> None:
    assert plan_command([*GPT2, "--top", "2"]) == DONE
    text = capfd.readouterr().out
    for part in ("simulated", "Fastest layouts", "Pareto front", "Refused", "Which strategy when", "closest evidence"):
        assert part in text
    use_language("fr")
    assert plan_command([*GPT2, "--top", "2"]) == DONE
    assert "Front de Pareto" in capfd.readouterr().out


def test_plan_command_says_loudly_what_of_a_device_nobody_measured(capfd: pytest.CaptureFixture[str]) -> None:
    told = _json(capfd, *GPT2, "--device", "l40s", "--top", "1")
    names = ["products.bf16", "launch_s", "pass_bandwidth", "attention.flash2"]
    assert told["class_defaults"] == names and told["calibration"] == "typical"
    assert _json(capfd, *GPT2, "--top", "1")["class_defaults"] == []
    use_language("fr")
    assert plan_command([*GPT2, "--device", "l40s", "--top", "1"]) == DONE
    assert "non mesuré" in capfd.readouterr().out
    with pytest.raises(LabError, match=r"il n’y a pas de fichier 'my\.toml'"):
        plan_command([*GPT2, "--device", "my.toml"])


def test_plan_command_why_tells_the_reason_and_fails_if_it_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert plan_command([*GPT2, "--why", "tp=4, micro_batch=3"]) == FAILED
    assert "a batch of 32 is no multiple of dp × micro-batch" in capfd.readouterr().out
    told = _json(capfd, *GPT2, "--why", "engine=torch zero=3 pp=2", code=FAILED)
    assert told["reason"] == "engine" and told["smallest_change"]["words"]
    assert plan_command([*GPT2, "--why", "dp=4 sequence_parallel=no checkpointing=none"]) == DONE
    assert "fit" in capfd.readouterr().out


def test_plan_command_writes_the_files_of_the_best_and_its_figure(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, figure = tmp_path / "planned", tmp_path / "plan.png"
    words = ["--write", str(folder), "--figure", str(figure), "--account", "abc", "--hours", "2"]
    assert plan_command([*GPT2, *words]) == DONE
    assert figure.stat().st_size > 20_000 and {"run_config.json", "job.sh", "torchrun.txt"} <= {
        path.name for path in folder.iterdir()
    }
    script = (folder / "job.sh").read_text(encoding="utf-8")
    assert subprocess.run(["bash", "-n", str(folder / "job.sh")], check=False).returncode == 0
    assert "#SBATCH --account=abc@a100" in script and "#SBATCH --time=02:00:00" in script
    assert RunConfig.from_json((folder / "run_config.json").read_text(encoding="utf-8")).layout.world_size == 4
    assert str(folder / "job.sh") in capfd.readouterr().err


def test_plan_command_writes_for_a_decoder_a_script_that_starts_its_program(capfd: pytest.CaptureFixture[str]) -> None:
    words = [*OWN, "--gpus", "8", "--batch", "32", "--engine", "megatron-core", "--script", "--account", "abc"]
    told = _json(capfd, *words)
    assert "pretrain_gpt.py" in told["script"] and "#SBATCH --account=abc@a100" in told["script"]


def test_plan_command_has_a_queue_limit_the_training(capfd: pytest.CaptureFixture[str]) -> None:
    told = _json(capfd, *GPT2, "--qos", "qos_gpu_a100-dev", "--steps", "100")
    assert "hours" not in told["refused"]
    with pytest.raises(LabError, match=r"within 2 h \(qos_gpu_a100-dev\)"):
        plan_command([*GPT2, "--qos", "qos_gpu_a100-dev", "--steps", "100000000"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--gpus", "four"], "--gpus takes numbers such as 8 or 8,16,32"),
        (["--batch", "0"], "--batch must be at least 1"),
        (["--layers", "12"], "missing: --hidden, --heads, --vocabulary, --sequence-length"),
        ([*OWN, "--model", "gpt2"], "too many: --model"),
        (["coatnet_0"], "one model is expected, but 'coatnet_0', 'gpt2'"),
        (["--why", "tp"], "--why takes fields"),
        (["--why", "xp=2"], "unknown field 'xp'"),
        (["--cluster", "selene", "--script"], r"selene has no table \[slurm\]"),
        (["--qos", "qos_gpu_a100-dev"], "say with --steps"),
        (["--qos", "long", "--steps", "5"], "unknown QoS 'long'"),
        (["--tp", "2"], "unknown flag"),
    ],
)
def test_plan_command_refuses_bad_words(words: list[str], sentence: str) -> None:
    base = (
        ["--gpus", "2", "--batch", "8"]
        if "--model" in words or "--layers" in words
        else ["--model", "gpt2", "--batch", "8"]
    )
    with pytest.raises(LabError, match=sentence):
        plan_command([*base, *words] if words[0] not in base else words)


def test_plan_command_teaches_in_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command(["--help"]) == DONE
    text = " ".join(capsys.readouterr().out.split())
    for word in ("Nothing is run", "smallest change", "dlojz validate", "--why", "megatron-1t"):
        assert word in text
