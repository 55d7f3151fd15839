"""The programs started alone, by torchrun, as the course prints it: no lab around them."""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dlojz.base.language import use_language
from dlojz.libraries import course_training
from dlojz.libraries.course_training import completed
from dlojz.libraries.library_catalogue import LIBRARIES, PROGRAMS, absence, command_alone, found
from dlojz.libraries.programs import with_torch

SLIDE = """{
    "zero_optimization": {
        "stage":2,
        "contiguous_gradients": true,
        "overlap_comm": true,
        "reduce_scatter": true,
        "reduce_bucket_size": 5e8,
        "allgather_bucket_size": 5e8
    }
}"""
"""DeepSpeed's file as the course prints it."""
SHIPPED = PROGRAMS / "ds_config_zero2.json"
RANKS = 2
TEXT = ["--model", "gpt_tiny", "--sequence-length", "32", "-b", "4", "--accumulation", "2", "-s", "3", "--lr", "0.3"]
IMAGES = ["-b", "28", "-s", "2", "--image-size", "32", "--lr", "0.3"]
"""The course's micro-batch, of smaller images, and fewer of them."""
OWN_WORDS = {
    "torch": [],
    "deepspeed": ["--deepspeed", "--deepspeed_config", str(SHIPPED)],
    "accelerate": ["--zero", "3", "--forced-fsdp"],
    "megatron": [],
    "colossalai": [],
}
TOLERANCE = 1e-5
"""On losses near 5: the arithmetic is the same, its order in a sum is not always."""


def start(name: str, *words: str) -> list[str]:
    """What a program prints, started by torchrun with steps that grow with the gradient; its losses are rank 0's."""
    python = str(LIBRARIES[name].python or sys.executable)
    launcher = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    script = str(Path(__file__).with_name("alone.py"))
    done = subprocess.run(
        [*launcher, script, str(LIBRARIES[name].program), "--descent", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def losses_of(lines: list[str]) -> list[float]:
    return [float(line.removeprefix("loss ")) for line in lines if line.startswith("loss ")]


def descended(words: list[str], monkeypatch: pytest.MonkeyPatch, clip: float = 0.0) -> list[float]:
    """The losses that the first rank must see, by one process that has the samples of all, by `alone.by_descent`."""
    monkeypatch.setenv("WORLD_SIZE", str(RANKS))
    args = course_training.parser().parse_args(words)
    model, batches, losses = course_training.build_model(args), iter(course_training.data_loader(args)), []
    for _ in range(args.steps):
        for number in range(args.accumulation * RANKS):
            loss = model(next(batches))
            (loss / (args.accumulation * RANKS)).backward()
            if number % RANKS == 0:
                losses.append(loss.item())
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(args.lr * parameter.grad / (parameter.grad.abs() + 1))
                parameter.grad = None
    return losses


@pytest.mark.parametrize(
    "name",
    [name if name == "torch" else pytest.param(name, marks=pytest.mark.nightly) for name in LIBRARIES],
)
def test_a_program_descends_along_the_mean_gradient_of_the_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all its micro-batches, on all ranks, neither clipped nor scaled: every loss is that of one process."""
    if (missing := absence(name)) is not None:
        pytest.skip(missing)
    told = start(name, *TEXT, *OWN_WORDS[name])
    expected = descended(TEXT, monkeypatch)
    assert len(expected) == 6 and expected[0] - expected[-1] > 0.1
    assert losses_of(told) == pytest.approx(expected, abs=TOLERANCE)
    if name == "accelerate":  # one unit per block and the rest; two ranks print at once, so that lines may run together
        given, printed = course_training.parser().parse_args(TEXT), "\n".join(told)
        blocks = len(course_training.build_model(given).blocks)
        assert (printed.count("sharded "), printed.count("sharded WithLoss")) == (RANKS * (blocks + 1), RANKS)


def test_the_courses_own_file_trains_by_the_courses_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`-b 28 -s … --image-size … --deepspeed --deepspeed_config ds_config_zero2.json`, the file as it is printed there:
    with micro-batches of 28, and gradients clipped at 1.0, which DeepSpeed does unless told."""
    file = tmp_path / "ds_config_zero2.json"
    file.write_text(SLIDE)
    told = losses_of(start("deepspeed", *IMAGES, "--deepspeed", "--deepspeed_config", str(file)))
    assert told == pytest.approx(descended(IMAGES, monkeypatch, clip=1.0), abs=TOLERANCE)
    assert told[-1] != pytest.approx(descended(IMAGES, monkeypatch)[-1], abs=TOLERANCE)


def test_the_file_is_the_slides_but_for_clipping() -> None:
    """Which DeepSpeed does at 1.0 unless told; the sizes of batches are on the command line."""
    printed, shipped = json.loads(SLIDE), json.loads(SHIPPED.read_text())
    assert shipped == {**printed, "gradient_clipping": 0.0}


def asked(*words: str) -> argparse.Namespace:
    made = course_training.parser()
    made.add_argument("--deepspeed_config")
    made.add_argument("--zero", type=int)
    return made.parse_args(words)


def test_completed_takes_from_the_command_line_what_the_file_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    file = tmp_path / "given.json"
    for sizes in ({}, {"train_batch_size": "auto"}, {"train_micro_batch_size_per_gpu": 8, "train_batch_size": 48}):
        file.write_text(json.dumps({"zero_optimization": {"stage": 1}, **sizes}))
        found = completed(asked("-b", "8", "--accumulation", "3", "--zero", "1", "--deepspeed_config", str(file)))
        given = {key: value for key, value in sizes.items() if value != "auto"}
        assert found == {
            **{"zero_optimization": {"stage": 1}, **given},
            **{"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 3},
        }


@pytest.mark.parametrize(("text", "words", "english", "french"), [
    (None, [], "--deepspeed_config FILE is missing", "il manque --deepspeed_config"),
    (None, ["--deepspeed_config", "absent.json"], "cannot be read (No such file", "ne peut pas être lu"),
    ("{", [], "cannot be read (Expecting", "ne peut pas être lu"),
    ("[]", [], "must hold a JSON object", "doit contenir un objet"),
    ('{"train_micro_batch_size_per_gpu": 4}', ["-b", "28"], "says train_micro_batch_size_per_gpu: 4", "-b : 28"),
    ('{"gradient_accumulation_steps": 1}', ["--accumulation", "2"], "the command line --accumulation: 2", ": 1, et"),
    ('{"train_batch_size": 16}', ["-b", "4"], "--accumulation × 2: 8", "dit train_batch_size : 16"),
    ('{"zero_optimization": {"stage": 2}}', ["--zero", "3"], "says stage: 2", "la ligne de commande --zero : 3"),
])  # fmt: skip
def test_a_file_that_says_another_training_is_refused_in_one_sentence(
    text: str | None, words: list[str], english: str, french: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    if text is not None:
        (tmp_path / "given.json").write_text(text)
        words = [*words, "--deepspeed_config", str(tmp_path / "given.json")]
    for language, part in (("en", english), ("fr", french)):
        use_language(language)
        with pytest.raises(SystemExit) as ended:
            completed(asked(*words))
        assert part in str(ended.value) and "\n" not in str(ended.value)


@pytest.mark.parametrize(("words", "part"), [
    (["--tp", "2"], "--tp 2 was received, which this program does not do"),
    (["--zero", "1"], "invalid choice: 1"),
    (["--step", "3"], "--step 3 was received"),
])  # fmt: skip
def test_a_word_that_a_program_does_not_follow_ends_it_with_one_sentence(
    words: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        with_torch.main(words)
    told = capsys.readouterr().err
    assert ended.value.code == 2 and part in told and told.count("\n") == 1


def test_course_training_device_is_the_gpu_of_the_ranks_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL, and whatever asks for "cuda" alone, would else meet on the first."""
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert [course_training.device(course_training.parser().parse_args([]))] == taken == [torch.device("cuda", 3)]
    assert (
        course_training.device(course_training.parser().parse_args(["--device", "cpu"])) == torch.device("cpu")
        and len(taken) == 1
    )


@pytest.mark.parametrize("name", LIBRARIES)
def test_the_command_line_of_a_program_has_whole_paths_and_words_that_it_knows(name: str) -> None:
    words = shlex.split(command_alone(name))
    assert str(LIBRARIES[name].program) in words and ("deepspeed" not in name or str(SHIPPED) in words)
    known = LIBRARIES[name].program.read_text() + Path(str(course_training.__file__)).read_text() + "--deepspeed_config"
    options = [word for word in words[words.index(str(LIBRARIES[name].program)) :] if word.startswith("-")]
    assert options and all(option in known for option in options)


@pytest.mark.parametrize("line", [
    "parser = deepspeed.add_config_arguments(parser)",
    "model_engine, optimizer, _, _ = deepspeed.initialize(",
    "model_engine.backward(loss)",
    "model_engine.step()",
])  # fmt: skip
def test_the_program_has_the_courses_own_lines(line: str) -> None:
    assert line in LIBRARIES["deepspeed"].program.read_text()


@pytest.mark.nightly
@pytest.mark.skipif(not found("accelerate"), reason="Accelerate is not installed here: make libraries")
def test_a_bare_accelerator_makes_no_group_where_there_is_no_gpu(tmp_path: Path) -> None:
    """The trap that the program's `cpu=True` avoids: two processes, each alone on all the data, and nothing is said."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    script = tmp_path / "bare.py"
    script.write_text(
        "import os\nfrom accelerate import Accelerator\n"
        "for cpu in (False, True):\n"
        "    made = Accelerator(cpu=cpu)\n"
        "    line = f'told {cpu} {made.num_processes} {made.distributed_type.value}\\n'\n"
        "    os.write(1, line.encode())  # in one piece: print() may write a line in several, between another rank's\n"
        "    made.state._reset_state(reset_partial_state=True)\n"
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    told = re.findall(r"told (True|False) (\d) (NO|MULTI_CPU)", done.stdout)
    assert sorted(told) == [("False", "1", "NO")] * 2 + [("True", "2", "MULTI_CPU")] * 2, done.stderr[-2000:]
