"""What the command refuses: one sentence on stderr, exit code 2, no traceback, nothing on stdout."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dlojz.cli.main import main
from tests.cli.process import dlojz_process

REFUSED = {
    "--modle coatnet_tiny": ["'--modle'", "did you mean '--model'?", "--micro-batch", "--json"],
    "--dp 3 --processes 2": ["dp=3", "needs 3 processes", "2 were received", "use dp=2"],
    "--micro-batch -4": ["micro_batch must be at least 1", "-4"],
    "--micro-batch=0": ["micro_batch must be at least 1", "0"],
    "--engine single --zero 3": ["engine 'single'", "zero=3", "use engine 'torch' or 'deepspeed'"],
    "--zero 1": ["no ZeRO-1", "use engine 'deepspeed'"],
    "--image-size 50": ["multiple of 32", "50 was received", "use 32 or 64"],
    "--model coatnet_tny": ["unknown model 'coatnet_tny'", "did you mean 'coatnet_tiny'?", "coatnet_7"],
    "--engine tortch": ["unknown engine 'tortch'", "did you mean 'torch'?", "deepspeed"],
    "--dp two": ["dp", "integer", "'two'"],
    "--dp": ["--dp needs a value"],
    "--dp --json": ["--dp needs a value"],
    "--learning-rate nan": ["learning_rate", "nan"],
    "--seed 99999999999999999999": ["seed", "99999999999999999999"],
    "--tp 2 --engine deepspeed": ["tp=2", "engine 'deepspeed'", "use engine='by_hand'"],
    "--tp 3": ["tp=3 does not divide", "coatnet_tiny", "use tp=2"],
    "--time-limit-s -1": ["--time-limit-s", "-1"],
    "--on moon": ["unknown backend 'moon'", "local"],
}


OF_SCRIPTS = {
    "train.py --lr 3": ["--lr is no option of `dlojz run`", "`dlojz run train.py -- --lr 3`"],
    "--nproc 2 train.py --lr=3 --wd 1": ["--lr=3 is no option", "`dlojz run --nproc 2 train.py -- --lr=3 --wd 1`"],
    "train.py 3": ["3 is no option of `dlojz run`", "`dlojz run train.py -- 3`"],
    "-m package.train --lr 3": ["`dlojz run -m package.train -- --lr 3`"],
    "train.py --steps 3": ["--steps configures a training of the lab's", "write it after --"],
    "noext": ["'noext' is no Python script", "(train.py)", "-m package.train", "torchrun train.py"],
    ".": ["'.' is a folder without __main__.py"],
    "missing.py": ["'missing.py' is no file"],
    "-m nowhere.train": ["no module 'nowhere.train'"],
    "package.train": ["'package.train' is a module: write `dlojz run -m package.train`"],
    "-- nothing-of-this-name x": ["'nothing-of-this-name' is no file"],
    "--nproc 2 -- env x": ["--nproc is for a script"],
    "--parity -- env x": ["--parity is for a script"],
    "train.py --parity": ["--parity compares several processes with one: give their number, as --nproc 2"],
    "train.py --parity --nproc 1": ["give their number, as --nproc 2"],
    "train.py --nproc 2 --parity-steps 5": ["--parity-steps goes with --parity"],
    "train.py --nproc 2 --parity --parity-steps 0": ["--parity-steps must be at least 1", "'0'"],
    "--model vit_tiny --parity": ["--parity is for a script, but none was named"],
}


@pytest.mark.parametrize("line", OF_SCRIPTS)
def test_main_refuses_a_request_for_a_script_in_one_sentence(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "package").mkdir()
    for name in ("train.py", "noext", "package/train.py"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    code = main(["run", *line.split()])
    told = capsys.readouterr()
    _is_refusal(code, told.out, told.err, OF_SCRIPTS[line])


def _is_refusal(code: int, out: str, said: str, expected: list[str]) -> None:
    assert code == 2, said
    assert out == ""
    assert said.startswith("dlojz: ") and said.count("\n") == 1, said
    assert "Traceback" not in said and "╭" not in said
    for words in expected:
        assert words in said


Refuse = Callable[[str, list[str]], None]


@pytest.fixture
def refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Refuse:
    """Give a command line in this process, and see that it is refused in these words."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DLOJZ_RUNS", str(tmp_path / "runs"))

    def check(line: str, expected: list[str]) -> None:
        try:
            code: object = main(line.split())
        except SystemExit as end:
            code = end.code
        assert isinstance(code, int)
        _is_refusal(code, *capfd.readouterr(), expected)

    return check


def test_a_process_refuses_with_its_exit_code(tmp_path: Path) -> None:
    done = dlojz_process("run", "--modle", "coatnet_tiny", cwd=tmp_path, DLOJZ_RUNS=str(tmp_path / "runs"))
    _is_refusal(done.returncode, done.stdout, done.stderr, REFUSED["--modle coatnet_tiny"])


@pytest.mark.parametrize("line", REFUSED)
def test_main_run_refuses_in_one_sentence_and_makes_no_folder(line: str, refuse: Refuse, tmp_path: Path) -> None:
    refuse(f"run {line}", REFUSED[line])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "line, expected",
    [
        ("frobnicate", ["unknown command 'frobnicate'", "run", "doctor"]),
        ("modles", ["did you mean 'models'?"]),
        ("predict --zero 7", ["zero must be at most 3", "7"]),
        ("predict --rank 5", ["rank", "5"]),
        ("logs 20250101", ["no run is named '20250101'", "there is no run in"]),
        ("cancel ../../etc", ["no run is named '../../etc'"]),
        ("logs", ["takes RUN (name of a run", "nothing was received"]),
        ("compare nothing", ["no run is named 'nothing'"]),
        ("compare", ["no run to compare"]),
        ("compare --figure", ["--figure needs a value"]),
        ("demo --steps 0", ["--steps must be at least 1"]),
        ("labs bild", ["did you mean 'build'?"]),
        ("labs list --force", ["--force belongs to `dlojz labs build`"]),
        ("labs glossary bubbel", ["no word 'bubbel'", "bubble"]),
        ("models --jsno", ["did you mean '--json'?"]),
    ],
)
def test_main_refuses_in_one_sentence_with_the_other_commands(line: str, expected: list[str], refuse: Refuse) -> None:
    refuse(line, expected)


def test_main_refuses_in_json_mode_too(refuse: Refuse) -> None:
    refuse("predict --model nothing --json", ["unknown model 'nothing'"])


def test_an_unwritable_place_for_runs_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    done = dlojz_process("run", "--steps", "1", cwd=tmp_path, DLOJZ_RUNS=str(tmp_path / "file" / "runs"))
    assert done.returncode in (1, 2) and done.stderr.startswith("dlojz: ") and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "line",
    [
        "predict --model vit_tiny --image-size 65536 --micro-batch 2147483647",
        "memory vit_tiny --image-size 65536 --micro-batch 2147483647",
        "grid --model vit_tiny --pp 2 --image-size 65536 --micro-batch 2147483647",
        "plan --model vit_tiny --gpus 2 --image-size 1000000000",
    ],
)
def test_main_refuses_tensors_beyond_what_torch_addresses(line: str, refuse: Refuse) -> None:
    refuse(line, ["more bytes than a 64-bit number counts"])


@pytest.mark.parametrize(
    "verb",
    [
        "predict",
        "memory vit_tiny",
        "grid --model vit_tiny --pp 2",
        "partition --model vit_tiny --compare",
        "run --model vit_tiny",
        "machines local",
    ],
)
def test_main_refuses_images_of_a_thousand_million_pixels_a_side(verb: str, refuse: Refuse) -> None:
    refuse(f"{verb} --image-size 1000000000", ["image_size must be at most 65536", "1000000000"])


def test_main_refuses_sequences_of_two_thousand_million_tokens(refuse: Refuse) -> None:
    refuse("predict --model gpt_tiny --sequence-length 2147483648", ["sequence_length must be at most 268435456"])


def test_main_refuses_more_stages_than_blocks_before_it_builds_their_schedule(
    refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a schedule of a hundred million actions was about to be built")

    monkeypatch.setattr("dlojz.pipeline.schedule_catalogue.build", never)
    for verb in ("predict", "memory", "grid", "run --data synthetic"):
        refuse(f"{verb} --pp 1000 --micro-batches 100000", ["pp=1000 makes 1000 stages", "use "])


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_any_encoding_of_the_terminal_will_do(encoding: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dlojz", "predict", "--dp", "2"],
        capture_output=True,
        timeout=240,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "DLOJZ_LANG": "fr", "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"},
    )
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr
    assert "DDP ×2" in done.stdout.decode(encoding) or b"DDP ?2" in done.stdout
