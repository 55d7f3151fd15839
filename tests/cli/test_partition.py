"""`dlojz partition`: what it prints, draws and refuses; its cuts are those of the functions."""

import json
from pathlib import Path
from typing import Any

import pytest

from dlojz.base.language import use_language
from dlojz.cli.main import DONE, REFUSED, main
from dlojz.config.run_config import RunConfig
from dlojz.pipeline.partition import PEERS, block_weights, exact, total_time
from dlojz.prediction.shapes import model_shapes, num_blocks
from tests.models import own_models

COATNET = ["--model", "coatnet_7", "--stages", "8"]


def _json(capfd: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["partition", *words, "--json"]) == DONE
    return json.loads(capfd.readouterr().out)


def test_main_partition_holds_every_cut_as_json(capfd: pytest.CaptureFixture[str]) -> None:
    told = _json(capfd, *COATNET, "--compare", "--micro-batches", "16")
    weighed = block_weights(RunConfig.of(model="coatnet_7"))
    best = exact(weighed.weights, 8)
    assert told["by"] == told["unit"] == "parameters" and told["stages"] == 8 and told["micro_batches"] == 16
    assert [block["weight"] for block in told["blocks"]] == list(weighed.weights)
    assert list(told["methods"]) == ["exact", *PEERS]
    exactly = told["methods"]["exact"]
    assert exactly["bounds"] == list(best.bounds) and exactly["loads"] == list(best.loads) and exactly["optimal"]
    assert exactly["total_time"] == total_time(best.loads, 16)
    assert not told["methods"]["uniform"]["optimal"]
    assert told["imbalance_of_cut_by"]["parameters"]["parameters"] == best.imbalance
    assert set(told["imbalance_of_cut_by"]) == {"parameters", "flops", "uniform"}


@pytest.mark.parametrize(
    "language, words",
    [
        ("en", ["60 blocks", "bottleneck", "imbalance", "4 × AttentionBlock, PoolingHead", "cut by", "1.09"]),
        ("fr", ["60 blocs", "goulot", "déséquilibre", "4 × AttentionBlock, PoolingHead", "découpage selon", "1,09"]),
    ],
)
def test_main_partition_prints_the_cuts_in_both_languages(
    capfd: pytest.CaptureFixture[str], language: str, words: list[str]
) -> None:
    use_language(language)
    assert main(["partition", *COATNET, "--compare"]) == DONE
    printed = capfd.readouterr().out
    for word in (*words, "DeepSpeed", "torchgpipe", "19 6 6 6 6 6 6 5", "334 M"):
        assert word in printed
    assert all(len(line) <= 100 for line in printed.splitlines())


def test_main_partition_takes_measured_time_and_patterns(capfd: pytest.CaptureFixture[str]) -> None:
    timed = _json(
        capfd, "--model", "gpt_tiny", "--stages", "2", "--by", "time", "--micro-batch", "1", "--device", "cpu"
    )
    assert timed["unit"] == "s" and all(block["weight"] > 0 for block in timed["blocks"])
    matched = _json(capfd, "--model", "coatnet_tiny", "--stages", "2", "--pattern", "attention")
    assert matched["by"] == "regex" and matched["pattern"] == "attention"
    assert {block["weight"] for block in matched["blocks"]} == {0, 1}


def test_main_partition_writes_the_picture(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "cut.png"
    assert main(["partition", "--model", "alexnet", "--by", "flops", "--png", str(target)]) == DONE
    assert target.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") and str(target) in capfd.readouterr().err


@pytest.mark.parametrize(
    "line, words",
    [
        ("--model alexnet --stages 9", ["at least one block", "9 stages", "8", "use at most 8 stages"]),
        ("--model alexnet --stages 9 --by time", ["use at most 8 stages"]),
        ("--stages 0", ["--stages must be at least 1"]),
        ("--stages two", ["--stages takes a number"]),
        ("--by weigth", ["'weigth'", "parameters, flops, time, uniform, regex"]),
        ("--by regex", ["pattern"]),
        ("--by flops --pattern Conv", ["pattern"]),
        ("--pattern Nothing", ["'Nothing'", "no block", "MBConvBlock"]),
        ("--pattern (", ["'('", "no regular expression"]),
        ("--model coatnet_8", ["did you mean 'coatnet_7'?"]),
        ("--image-size 50", ["multiple of 32"]),
        ("--png cut.txt", [".png"]),
    ],
)
def test_main_partition_refuses_in_one_sentence(capfd: pytest.CaptureFixture[str], line: str, words: list[str]) -> None:
    assert main(["partition", *line.split()]) == REFUSED
    told = capfd.readouterr()
    assert told.out == "" and told.err.startswith("dlojz: ") and told.err.count("\n") == 1
    for word in words:
        assert word in told.err


@pytest.mark.parametrize(
    ("model", "why"),
    [("torchvision:googlenet", "computes its loss itself"), (f"{own_models.__file__}:build", "in two blocks")],
)
def test_main_partition_gives_no_cut_of_a_model_that_no_pipeline_runs(
    capfd: pytest.CaptureFixture[str], model: str, why: str
) -> None:
    assert main(["partition", model, "--stages", "2"]) == REFUSED
    told = capfd.readouterr()
    assert told.out == "" and told.err.count("\n") == 1
    assert "no pipeline can run a cut of" in told.err and why in told.err


def test_a_chain_from_elsewhere_is_cut_into_the_blocks_that_its_pipeline_runs(
    capfd: pytest.CaptureFixture[str],
) -> None:
    told = _json(capfd, "torchvision:resnet18", "--stages", "2")
    shapes = model_shapes(RunConfig.of(model="torchvision:resnet18", pp=2))
    assert len(told["blocks"]) == num_blocks(shapes)
