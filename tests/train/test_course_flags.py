"""The course's command line, alone and in processes that a launcher has started."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.cli.course import OPTIONS, PROGRAM, configure, main
from dlojz.cli.options import parse
from dlojz.config.run_config import RunConfig
from dlojz.running.run import runs

ZERO_2 = '{"zero_optimization": {"stage": 2, "contiguous_gradients": true, "reduce_bucket_size": 5e8}}'
LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "GROUP_", "ROLE_")


@pytest.fixture
def zero_2(tmp_path: Path) -> Path:
    path = tmp_path / "ds_config_zero2.json"
    path.write_text(ZERO_2)
    return path


def environment(root: Path, **given: str) -> dict[str, str]:
    """As a shell has it in which no launcher has left anything."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    return {**clean, "OMP_NUM_THREADS": "1", "DLOJZ_RUNS": str(root), "DS_ACCELERATOR": "cpu", **given}


def test_configure_reads_the_course_s_line_as_this_run(zero_2: Path) -> None:
    words = f"-b 28 -s 200 --image-size 288 --deepspeed --deepspeed_config {zero_2}".split()
    config, left = configure(parse(PROGRAM, OPTIONS, words), 4)
    assert config == RunConfig.of(micro_batch=28, steps=200, image_size=288, dp=4, zero=2, engine="deepspeed")
    assert left == ("zero_optimization.contiguous_gradients", "zero_optimization.reduce_bucket_size")


@pytest.mark.parametrize(
    ("line", "processes", "fields"),
    [
        ("", 1, {}),
        ("-b 4 -s 5", 2, {"micro_batch": 4, "steps": 5, "dp": 2}),
        ("--zero 3 --checkpointing selective", 2, {"dp": 2, "zero": 3, "checkpointing": "selective"}),
        ("-p 2 --accumulation 4 --lr 0.1 --wd 0.01", 4, {"dp": 2, "pp": 2, "micro_batches": 4, "learning_rate": 0.1}),
        ("--model gpt_tiny --sequence-length 32 --local_rank=1 --batch-size 2", 1, {"model": "gpt_tiny"}),
        ("--deepspeed-config {file} --precision bf16", 2, {"dp": 2, "zero": 2, "precision": "bf16"}),
        ("--deepspeed_config={file} --offload activations", 2, {"dp": 2, "zero": 2, "offload": "activations"}),
    ],
)
def test_configure_reads_flags_as_fields(line: str, processes: int, fields: dict[str, Any], zero_2: Path) -> None:
    config, _ = configure(parse(PROGRAM, OPTIONS, line.format(file=zero_2).split()), processes)
    read = {**config.to_dict(), **config.layout.to_dict()}
    assert {name: read[name] for name in fields} == fields
    assert config.layout.world_size == processes


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--stps 3", "did you mean '--steps'?"),
        ("-b", "--batch-size needs a value after it (INT)"),
        ("-b many", "micro_batch: input should be a valid integer"),
        ("-b 0", "micro_batch must be at least 1"),
        ("-p two", "takes a number"),
        ("-p 3", "-p 3 pipeline stages do not divide 2 processes"),
        ("3", "does not know what to do with the word '3'"),
        ("--image-size 33", "must be a multiple of 32"),
        ("--deepspeed", "--deepspeed needs --deepspeed_config FILE"),
        ("--deepspeed_config nowhere.json", "nowhere.json cannot be read"),
        ("--deepspeed_config {file} --zero 3", "--zero 3 was received beside --deepspeed_config"),
        ("--deepspeed_config {micro} -b 3", "micro_batch is 3 on the command line and 8 in DeepSpeed's JSON file"),
    ],
)
@pytest.mark.parametrize("language", ["en", "fr"])
def test_configure_refuses_a_bad_line_in_one_sentence(line: str, words: str, language: str, zero_2: Path) -> None:
    use_language(language)
    micro = zero_2.with_name("micro.json")
    micro.write_text('{"train_micro_batch_size_per_gpu": 8}')
    with pytest.raises(LabError) as refused:
        configure(parse(PROGRAM, OPTIONS, line.format(file=zero_2, micro=micro).split()), 2)
    sentence = str(refused.value)
    assert "\n" not in sentence
    if language == "en":
        assert words in sentence


def test_main_of_train_teaches_in_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    for language, words in (("en", "The number of ranks is the launcher's"), ("fr", "sont affichés à la fin")):
        use_language(language)
        assert main(["--help"]) == 0
        shown = capsys.readouterr().out
        assert words in " ".join(shown.split())
        assert "srun python -m dlojz.train -b 28 -s 200 --image-size 288 --deepspeed --deepspeed_config" in shown


PLACES: list[tuple[dict[str, str], tuple[int, int]]] = [
    ({}, (0, 1)),
    ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}, (3, 4)),
    ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, (1, 2)),  # DeepSpeed's launcher
    # torchrun within a SLURM step: the inner launcher counts.
    ({"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}, (1, 2)),
]
# What idr_torch reads it keeps, so that each case has a process of its own; forked, since torch is slow to import.
TELL_PLACES = """
import json, os, sys
import torch
from dlojz.cli.course import place_of_this_process
for variables in json.loads(sys.argv[1]):
    if not os.fork():
        os.environ.update(variables)
        print(*place_of_this_process(), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


def test_place_of_this_process_has_the_ranks_of_the_launcher(tmp_path: Path) -> None:
    there = {"SLURM_LOCALID": "0", "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost"}
    there |= {"SLURM_STEP_TASKS_PER_NODE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    cases = [there | variables if variables else {} for variables, _ in PLACES]
    done = subprocess.run(
        [sys.executable, "-c", TELL_PLACES, json.dumps(cases)],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    assert [tuple(map(int, line.split())) for line in done.stdout.splitlines()] == [place for _, place in PLACES]
    assert done.stderr == ""


def test_train_in_two_processes_of_srun_is_one_run(zero_2: Path, tmp_path: Path) -> None:
    """As srun starts them: nothing but SLURM's variables tells one process of the other."""
    line = f"-b 4 -s 5 --image-size 32 --deepspeed --deepspeed_config {zero_2}".split()
    root = tmp_path / "runs"
    step = {
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": str(os.getpid()),  # which chooses the port
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": "localhost",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "dlojz.train", *line],
            env=environment(root, **step, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=280) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said
    [run] = runs(root)
    record = run.record
    assert record is not None and record.status == "completed"
    assert [footprint.rank for footprint in record.footprints] == [0, 1]
    assert record.config.layout.strategy == "zero-2"
    out = said[0][0]
    assert f"step 4: loss {record.losses[-1]:.4f}" in out
    assert "throughput:" in out and "peak memory of rank 0:" in out and str(run.folder) in out
    assert "set by the lab itself" in said[0][1]
    assert "loss" not in said[1][0], "one process speaks"


def test_train_ends_all_processes_where_the_first_one_refuses(tmp_path: Path) -> None:
    """torchrun, with a root that cannot be written: one sentence, no run, no process that waits."""
    root = tmp_path / "file"
    root.write_text("")
    done = subprocess.run(
        [
            sys.executable,
            *["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "dlojz.train"],
            *["-s", "1", "--root", str(root)],
        ],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode != 0
    assert done.stderr.count("runs cannot be written in") == 1
    assert "Traceback" not in done.stderr.split("torch/distributed")[0]


def test_train_alone_is_one_process(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dlojz.train", "-b", "4", "-s", "2", "--image-size", "32"],
        env=environment(tmp_path / "runs", DLOJZ_LANG="fr"),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "pas 1: perte" in done.stdout and "débit : non mesuré" in done.stdout
    assert done.stderr == "coatnet_tiny, un processus : 2 pas de 4 échantillons (4 × 1 × 1 rangs).\n"
    [run] = runs(tmp_path / "runs")
    assert run.state == "completed" and len(run.losses) == 2
