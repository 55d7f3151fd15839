"""`dlojz grid`: tells ranks, groups, nodes and bytes, in text, JSON and pictures, and refuses in one sentence."""

import json
from pathlib import Path
from typing import Any

import pytest

from dlojz.base.language import use_language
from dlojz.cli.main import main

PNG = b"\x89PNG\r\n\x1a\n"
PICTURE = ["--pp", "4", "--tp", "2", "--gpus-per-node", "8"]


def _json(capfd: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["grid", *words, "--json"]) == 0
    return json.loads(capfd.readouterr().out)


def test_main_grid_tells_the_picture_of_the_course_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grid", "--processes", "16", *PICTURE]) == 0
    printed = capsys.readouterr().out
    assert "16 ranks = dp 2 × pp 4 × tp 2, on 2 nodes of 8 GPUs, order tp-dp-pp" in printed
    assert "tp: 8 groups of 2, inside a node\n  [0 1] [2 3]" in printed
    assert "pp: 4 groups of 4, across nodes" in printed and "[0 4 8 12]* [1 5 9 13]*" in printed
    assert "tp stays inside the nodes; pp crosses nodes" in printed and "node 1  8 (2,0,0)" in printed


def test_main_grid_tells_the_bad_order_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grid", "--dp", "2", *PICTURE, "--order", "pp-dp-tp"]) == 0
    assert "tp crosses nodes" in (printed := capsys.readouterr().out) and "innermost, order tp-dp-pp" in printed
    assert main(["grid", "--tp", "8"]) == 0
    assert "a node has 4 GPUs, so use tp=4 or less" in capsys.readouterr().out
    assert main(["grid", "--tp", "3", "--dp", "4"]) == 0
    assert "3 does not divide the 4 GPUs of a node, so use tp=2" in capsys.readouterr().out


def test_main_grid_as_json_lays_the_predicted_bytes_on_links(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--dp", "2", "--pp", "2", "--gpus-per-node", "2", "--model", "vit_tiny", "--bandwidths", "300,25"]
    told = _json(capfd, *words)
    assert (told["world_size"], told["nodes"], told["groups"]["pp"]) == (4, [[0, 1], [2, 3]], [[0, 2], [1, 3]])
    assert told["inside"] == {"pp": False, "dp": True, "cp": True, "tp": True} and told["unknown"] is None
    assert told["ranks"][2] == {"rank": 2, "node": 1, "pp": 1, "dp": 0, "cp": 0, "tp": 0}
    rows = {(row["group"], row["collective"]): row for row in told["traffic"]}
    assert rows["dp", "all_reduce"]["between_bytes"] == 0 < rows["dp", "all_reduce"]["inside_bytes"]
    sent_bytes = rows["pp", "send"]["between_bytes"]
    assert rows["pp", "send"]["inside_bytes"] == 0 < sent_bytes
    assert told["seconds_per_axis"]["pp"] == pytest.approx(sent_bytes / 4 / 25e9)  # as much from each of the ranks
    by_order = told["between_bytes_by_order"]
    assert list(by_order) == ["tp-dp-pp", "pp-dp-tp"] and by_order["pp-dp-tp"]["pp"] == 0 < by_order["pp-dp-tp"]["dp"]


def test_main_grid_tells_context_parallelism_that_sends_round_its_ring(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--processes", "4", "--cp", "2", "--pp", "1", "--tp", "1", "--gpus-per-node", "2", "--model", "llama_tiny"]
    told = _json(capfd, *words)
    assert (told["dp"], told["cp"], told["groups"]["cp"]) == (2, 2, [[0, 1], [2, 3]])
    rows = {(row["group"], row["collective"]): row for row in told["traffic"]}
    assert rows["cp", "send"]["between_bytes"] == 0 < rows["cp", "send"]["inside_bytes"]
    assert 0 < rows["dp", "all_reduce"]["between_bytes"] == rows["dp", "all_reduce"]["inside_bytes"]
    assert main(["grid", *words]) == 0
    printed = capfd.readouterr().out
    assert "4 ranks = dp 2 × pp 1 × tp 1 × cp 2" in printed and "rank (pp,dp,cp,tp)" in printed
    assert "cp: 2 groups of 2, inside a node\n  [0 1] [2 3]" in printed and "dp crosses nodes" in printed


def test_bytes_in_text_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--dp", "2", "--pp", "2", "--gpus-per-node", "2", "--model", "vit_tiny"]
    assert (
        main(["grid", *words, "--bandwidths", "300,25", "--latencies", "2,10", "--png", str(tmp_path / "a.png")]) == 0
    )
    printed = capsys.readouterr().out
    assert "for vit_tiny, 4 micro-batches of 16:" in printed and "to node 1" in printed
    assert "Between nodes, by order of the axes:" in printed and "on the links per step: dp " in printed
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


def test_main_grid_is_told_also_where_bytes_are_not_known(capfd: pytest.CaptureFixture[str]) -> None:
    told = _json(capfd, "--tp", "3", "--dp", "4")  # 3 does not divide the heads of the default model
    assert told["traffic"] is None and "tp=3" in told["unknown"] and len(told["groups"]["tp"]) == 4
    assert main(["grid", "--tp", "3", "--model", "llama_tiny"]) == 2
    assert "tp=3" in capfd.readouterr().err


def test_main_grid_tells_many_ranks_in_short(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grid", "--dp", "16", "--pp", "8", "--tp", "8", "--gpus-per-node", "8"]) == 0
    printed = capsys.readouterr().out
    assert "1024 ranks" in printed and "…" in printed and len(printed.splitlines()) < 60


@pytest.mark.parametrize(
    "words, told",
    [
        ("--dp 0", "--dp must be at least 1"),
        ("--processes 7 --dp 2 --pp 2 --tp 2", "dp=2, pp=2, tp=2 make 8 processes"),
        ("--processes 16 --tp 2", "give dp or pp too"),
        ("--processes 16 --tp 3 --pp 1", "need a multiple of 3 processes"),
        ("--order tp-pp", "unknown order 'tp-pp'"),
        ("--axis ep --png x.png", "unknown axis 'ep'"),
        ("--axis tp", "--axis does nothing without --png: add --png"),
        ("--bandwidths 3", "--bandwidths takes two positive numbers"),
        ("--bandwidths nan,1", "--bandwidths takes two positive numbers"),
        ("--latencies 1,1", "does nothing without --bandwidths"),
        ("--gpus-per-node 0", "--gpus-per-node must be at least 1"),
        ("--dp 99999", "a grid lists at most 16384"),
        ("--dp 1024 --png x.png", "a picture shows at most 512 ranks"),
        ("--model nope", "unknown model 'nope'"),
    ],
)
def test_main_grid_refuses_in_one_sentence(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grid", *words.split()]) == 2
    printed = capsys.readouterr()
    assert told in printed.err and printed.out == "" and len(printed.err.strip().splitlines()) == 1
    use_language("fr")
    assert main(["grid", *words.split()]) == 2
    french = capsys.readouterr().err
    assert french != printed.err or words == "--model nope"


def test_main_grid_speaks_french(capsys: pytest.CaptureFixture[str]) -> None:
    use_language("fr")
    assert main(["grid", "--dp", "2", "--pp", "2", "--gpus-per-node", "2", "--model", "vit_tiny"]) == 0
    printed = capsys.readouterr().out
    assert "sur 2 nœuds de 2 GPU" in printed and "pp : 2 groupes de 2, à cheval sur des nœuds" in printed
    assert "Octets par pas, envoyés par tous les rangs, pour vit_tiny" in printed and "vers nœud 1" in printed
