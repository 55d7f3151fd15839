"""`dlojz memory`: what it prints, writes and refuses; its figures are those of the forecast."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from dlojz import hardware
from dlojz.base.language import format_bytes, use_language
from dlojz.cli.main import DONE, REFUSED, main
from dlojz.cli.options import config_flags, parse
from dlojz.config.run_config import RunConfig, command_of
from dlojz.display.memory_tables import verdict
from dlojz.planner.levers import taken_bytes
from dlojz.prediction.forecast import heaviest
from tests.models import own_models

PNG = b"\x89PNG\r\n\x1a\n"
ZERO_2 = ["gpt_tiny", "--dp", "2", "--zero", "2", "--engine", "deepspeed", "--micro-batch", "4"]


def _json(capfd: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["memory", *words, "--json"]) == DONE
    return json.loads(capfd.readouterr().out)


def test_main_memory_gives_as_json_the_forecast_of_the_fullest_rank(capfd: pytest.CaptureFixture[str]) -> None:
    told = _json(capfd, *ZERO_2)
    expected = heaviest(RunConfig.of(model="gpt_tiny", dp=2, zero=2, engine="deepspeed", micro_batch=4))
    assert told["memory"] == expected.memory.to_dict() and told["device"] == "cpu" and told["fits"] is None
    assert sum(sum(block["bytes"].values()) for block in told["at_peak_by_block"]) == expected.memory.peak_bytes
    assert told["activations_by_module"] == dict(expected.activations_by_module)
    by_name = {rule["name"]: rule for rule in told["rules"]}
    assert by_name["16-fp32"]["formula_bytes"] == 16 * 875_264
    assert {form["name"] for form in told["closed_forms_of_one_layer"]} >= {"Korthikanti", "ZeRO-Infinity"}


def test_main_memory_fit_tells_the_largest_batch_and_the_levers(capfd: pytest.CaptureFixture[str]) -> None:
    """The batch that is named fits, one sample more does not; each lever saves what its own forecast says."""
    told = _json(capfd, "gpt_tiny", "--dp", "2", "--precision", "fp32", "--fit", "v100-16")
    gpu = hardware.device("v100-16")
    fit = told["fit"]
    assert told["device"] == fit["device"] == "v100-16" and told["fits"] is True
    assert fit["taken_bytes"] <= fit["limit_bytes"] == gpu.memory_bytes
    more = heaviest(RunConfig.of(model="gpt_tiny", dp=2, micro_batch=fit["micro_batch"] + 1), gpu)
    assert taken_bytes(more) > gpu.memory_bytes
    for lever in told["levers"]:
        assert lever["saved_bytes"] == told["taken_bytes"] - lever["taken_bytes"]
    assert {"checkpointing", "tp"} <= {lever["name"] for lever in told["levers"]}
    assert {lever["name"]: lever["runnable"] for lever in told["levers"]}["tp"] is True


@pytest.mark.parametrize(
    "language, words",
    [
        ("en", ["By category", "What fills the peak", "16 Ψ", "32·sbh", "largest in the step", "allocated"]),
        ("fr", ["Par catégorie", "Ce qui remplit le pic", "16 Ψ", "32·sbh", "maximum dans le pas", "alloué"]),
    ],
)
def test_main_memory_prints_the_peak_and_its_moment(
    capfd: pytest.CaptureFixture[str], language: str, words: list[str]
) -> None:
    use_language(language)
    assert main(["memory", *ZERO_2, "--precision", "bf16"]) == DONE
    printed = capfd.readouterr().out
    config = RunConfig.of(model="gpt_tiny", dp=2, zero=2, engine="deepspeed", micro_batch=4, precision="bf16")
    told = heaviest(config)
    for word in (*words, told.moment, format_bytes(told.memory.peak_bytes), format_bytes(told.memory.weights_bytes)):
        assert word in printed
    assert all(len(line) <= 100 for line in printed.splitlines()[3:]) and "…" not in printed.replace(" … ", "")


def test_main_memory_on_a_gpu_tells_three_sizes_apart(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--precision", "fp32", "--micro-batch", "16", "--device", "v100-32"]
    assert main(["memory", "gpt_tiny", "--dp", "2", *words]) == DONE
    printed = capfd.readouterr().out
    memory = heaviest(RunConfig.of(model="gpt_tiny", dp=2), "v100-32").memory
    for label, num_bytes in (
        ("allocated", memory.peak_bytes),
        ("reserved by the allocator", memory.reserved_bytes),
        ("as nvidia-smi shows it", memory.device_bytes),
    ):
        assert any(line.startswith(label) and format_bytes(num_bytes) in line for line in printed.splitlines())
    assert "Fits into V100 32 GB" in printed


def test_main_memory_tells_a_model_that_it_is_too_large(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", "gpt2", "--micro-batch", "64", "--device", "v100-16"]) == DONE
    assert "Does NOT fit into V100 16 GB" in capfd.readouterr().out


def test_main_memory_writes_its_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    picture, snapshot = tmp_path / "memory.png", tmp_path / "memory.html"
    assert main(["memory", *ZERO_2, "--png", str(picture), "--snapshot", str(snapshot)]) == DONE
    assert picture.read_bytes().startswith(PNG)
    assert "MemoryViz" in snapshot.read_text(encoding="utf-8")
    assert str(picture) in capfd.readouterr().err


@pytest.mark.parametrize("language", ["en", "fr"])
def test_main_memory_meets_a_budget_block_by_block(
    language: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What is printed, the document and the command to type are of one plan."""
    use_language(language)
    picture, words = tmp_path / "curve.png", ["gpt_tiny", "--micro-batch", "8", "--budget", "45MiB"]
    told = _json(capfd, *words)
    config = RunConfig.from_dict(told["config"])
    limit = told["budget"]["limit_bytes"]
    assert told["memory"]["peak_bytes"] <= limit == 45 * 2**20 < told["budget"]["kept_peak_bytes"]
    assert main(["memory", *words, "--png", str(picture)]) == DONE
    printed = capfd.readouterr().out
    assert command_of(config) in printed and config.layout.activation_plan in printed
    assert format_bytes(told["memory"]["peak_bytes"]) in printed
    assert {"en": "offload", "fr": "décharger"}[language] in printed
    assert all(len(line) <= 100 for line in printed.splitlines()[3:-1])
    assert picture.read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    "line, expected",
    [
        ("gpt_tiny --device v100", ["unknown device 'v100'", "v100-16", "h200"]),
        ("gpt_tiny --fit moon", ["unknown device 'moon'", "a100-80"]),
        ("gpt_tny", ["unknown model 'gpt_tny'", "did you mean 'gpt_tiny'?"]),
        ("gpt_tiny vit_tiny", ["takes [MODEL] (model, like --model", "'gpt_tiny vit_tiny' was received"]),
        ("gpt_tiny --model vit_tiny", ["one model is expected"]),
        ("gpt_tiny --dp 2 --rank 2", ["rank 2 does not exist"]),
        ("gpt_tiny --snapshot step.json", [".html", "step.json"]),
        ("gpt_tiny --png step.docx", ["--png needs a name that ends in .png, .svg or .pdf", "'step.docx'"]),
        ("gpt_tiny --offload optimizer", ["DeepSpeed's", "zero=1"]),
        ("gpt_tiny --image-size 32", ["image_size"]),
        ("gpt_tiny --budget much", ["--budget takes a size such as 30GiB", "'much'"]),
        ("gpt_tiny --budget 1MiB", ["1.00 MiB is too small", "the smallest budget that works is"]),
        ("gpt_tiny --budget 1GiB --pp 2", ["pp=2 was received with activation_plan", "use pp=1"]),
        ("gpt_tiny --budget 1GiB --checkpointing full", ["checkpointing='full'", "activation_plan"]),
        ("gpt_tiny --budget 1GiB --fit a100-80", ["give one of the two"]),
        ("gpt_tiny --budget 1GiB --device 24GiB", ["the speed of a GPU given by its size is not known"]),
        ("gpt_tiny --device 24", ["unknown device '24'", "or a size such as 24GiB"]),
    ],
)
def test_main_memory_refuses_in_one_sentence(line: str, expected: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", *line.split()]) == REFUSED
    told = capfd.readouterr()
    assert told.out == "" and told.err.startswith("dlojz: ") and told.err.count("\n") == 1
    for words in expected:
        assert words in told.err


@pytest.mark.parametrize(
    ("language", "words"),
    [
        ("en", ["a budget of 1.00 MiB is too small", "of it states", "the smallest budget that works is"]),
        ("fr", ["un budget de 1,00 Mio est trop petit", "d’états", "le plus petit budget possible est"]),
    ],
)
def test_a_budget_below_the_states_is_refused_and_the_smallest_one_works(
    language: str, words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    use_language(language)
    assert main(["memory", "gpt_tiny", "--budget", "1MiB"]) == REFUSED
    told = capfd.readouterr().err
    assert told.count("\n") == 1 and all(one in told for one in words)
    smallest = told.rstrip(".\n").split()[-1]
    assert main(["memory", "gpt_tiny", "--budget", smallest]) == DONE


@pytest.mark.parametrize("language", ["en", "fr"])
def test_main_memory_names_a_nearly_full_gpu_as_a_risk(language: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Above nine tenths the verdict says what that has cost; below it says nothing."""
    use_language(language)
    risk = {"en": "free what it caches", "fr": "rendre ce qu’il garde"}[language]
    limit = 10 * 2**30
    assert risk not in verdict(int(0.9 * limit), limit, "GPU") and risk not in verdict(limit + 1, limit, "GPU")
    assert risk in verdict(int(0.91 * limit), limit, "GPU") and "91" in verdict(int(0.91 * limit), limit, "GPU")
    assert main(["memory", "vit_b_16", "--device", "h100"]) == DONE
    told = capfd.readouterr().out
    assert risk not in told and "expandable_segments:True" in told


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"model": "gpt_tiny", "dp": 4, "zero": 2, "engine": "deepspeed", "offload": "optimizer", "sequence_length": 32},
        {"model": "vit_tiny", "dp": 2, "gradient_as_bucket_view": True, "bucket_mib": 0.5, "learning_rate": 0.25},
        {"engine": "single", "micro_batch": 3, "precision": "bf16", "keep_weights": True, "data": "synthetic"},
        {"dp": 2, "zero": 3, "engine": "deepspeed", "offload": "optimizer", "data_root": "/a path/with spaces"},
        {"activation_plan": "keep:3,recompute:6,offload:1"},
    ],
)
def test_the_command_to_type_asks_for_the_same_configuration(fields: dict[str, Any]) -> None:
    config = RunConfig.of(**fields)
    words = shlex.split(command_of(config))
    assert words[:2] == ["dlojz", "run"]
    assert RunConfig.of(**parse("dlojz run", config_flags(), words[2:])) == config


@pytest.mark.parametrize("language", ["en", "fr"])
def test_main_memory_tells_a_model_from_elsewhere_in_its_own_names(
    capfd: pytest.CaptureFixture[str], language: str
) -> None:
    """No numbers of blocks that the module does not have, no folder of this machine, and what `--fit` promises."""
    use_language(language)
    own = f"{Path(own_models.__file__)}:build"
    assert main(["memory", own, "--dp", "8", "--zero", "3", "--fit", "a100-80"]) == DONE
    printed = capfd.readouterr().out
    assert "layers.0 … 4 (×5)" in printed and "layers.*.mlp.* (×" in printed and "Tied" in printed
    assert "blocks." not in printed and "own_models.py:build" in printed and str(Path.cwd()) not in printed
    assert {"en": "Largest micro-batch that fits", "fr": "Le plus grand micro-batch"}[language] in printed
    assert "bf16" in printed


@pytest.mark.parametrize(
    "words",
    [
        ["memory", "--budget", "1GiB"],
        ["partition", "--stages", "2", "--by", "time"],
        ["run", "--dp", "2", "--library", "accelerate"],
    ],
)
def test_what_a_model_from_elsewhere_cannot_do_is_refused_in_one_line(
    capfd: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert main([words[0], "--model", f"{Path(own_models.__file__)}:build", *words[1:]]) == REFUSED
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "own_models.py:build" in said and str(Path.cwd()) not in said


@pytest.mark.parametrize("language", ["en", "fr"])
def test_main_memory_takes_a_text_model_on_a_gpu_in_16_bit_with_one_sample(
    capfd: pytest.CaptureFixture[str], language: str
) -> None:
    """The first line says what was assumed; the figures are those of the configuration that says so."""
    use_language(language)
    words = ["llama_3_8b", "--dp", "8", "--zero", "3", "--device", "a100-80"]
    assert main(["memory", *words]) == DONE
    printed = capfd.readouterr().out.splitlines()
    assert (
        printed[0]
        == {
            "en": "Assumed: bf16 (mixed precision), 1 sample of 8,192 tokens per GPU; other values by --precision, "
            "--micro-batch, --sequence-length.",
            "fr": "Supposé : bf16 (précision mixte), 1 exemple de 8\u202f192 tokens par GPU ; autres valeurs par "
            "--precision, --micro-batch, --sequence-length.",
        }[language]
    )
    config = RunConfig.of(model="llama_3_8b", dp=8, zero=3, precision="bf16", micro_batch=1)
    expected = heaviest(config, "a100-80")
    told = _json(capfd, *words)
    assert told["memory"] == expected.memory.to_dict() and RunConfig.from_dict(told["config"]) == config
    assert told["assumed"] == {"precision": "bf16", "micro_batch": 1, "sequence_length": 8192}
    assert told["fit"]["micro_batch"] == 1 and "levers" not in told
    last = {"en": "Largest micro-batch that fits into A100 80 GB: 1 sample (", "fr": "tient sur A100 80 Go : 1 exemple"}
    assert last[language] in printed[-1]


@pytest.mark.parametrize(
    ("line", "assumed"),
    [
        ("gpt_tiny --device v100-32", {"precision": "fp16", "micro_batch": 1, "sequence_length": 128}),
        ("gpt_tiny --fit h100 --micro-batch 4", {"precision": "bf16", "sequence_length": 128}),
        ("llama_tiny --device h100 --sequence-length 64 --precision fp32", {"micro_batch": 1}),
        ("gpt_tiny --device h100 --sequence-length 64 --precision fp32 --micro-batch 2", {}),
        ("gpt_tiny --device h100 --library megatron --dp 2", {"micro_batch": 1, "sequence_length": 128}),
        ("gpt_tiny", {}),
        ("vit_tiny --device h100", {}),
    ],
)
def test_main_memory_assumes_only_what_was_left_open(
    capfd: pytest.CaptureFixture[str], line: str, assumed: dict[str, object]
) -> None:
    told = _json(capfd, *line.split())
    assert told["assumed"] == assumed
    config = RunConfig.from_dict(told["config"])
    flat = {**config.to_dict(), **config.layout.to_dict()}
    assert {name: flat[name] for name in assumed} == assumed


def test_main_memory_lists_the_levers_where_not_one_sample_fits(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", "llama_3_8b", "--dp", "8", "--zero", "3", "--device", "a100-40"]) == DONE
    printed = capfd.readouterr().out
    assert "Not even one sample fits into A100 40 GB" in printed and "checkpoint every block" in printed


@pytest.mark.parametrize("language", ["en", "fr"])
def test_main_memory_takes_a_gpu_by_its_size(capfd: pytest.CaptureFixture[str], language: str) -> None:
    """Of 80 GiB, CUDA's context and NCCL take what they take of the largest known one; the verdict is of the size."""
    use_language(language)
    size = hardware.device("24GiB")
    known = hardware.DEVICES.values()
    assert size.memory_bytes == 24 * 2**30 == hardware.device("25769803776B").memory_bytes
    assert size.allocatable_bytes(2) == 24 * 2**30 - max(one.context_bytes for one in known) - 1536 * 2**20
    assert main(["memory", "gpt2", "--dp", "2", "--device", "24GiB", "--precision", "bf16"]) == DONE
    printed = capfd.readouterr().out
    assert {"en": "GPU 24.0 GiB", "fr": "GPU 24,0 Gio"}[language] in printed and "mem_get_info" in printed
    expected = heaviest(RunConfig.of(model="gpt2", dp=2, micro_batch=1, precision="bf16"), size)
    assert format_bytes(taken_bytes(expected)) in printed
