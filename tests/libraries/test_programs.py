"""The programs started alone, by torchrun, as the course prints it: no lab around them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dlojz.libraries import LIBRARIES, PROGRAMS, course, found

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
PRINTED = ["-b", "4", "-s", "2", "--image-size", "32"]


def start(name: str, *words: str, processes: int = 2) -> list[str]:
    """What a program prints, started by torchrun; of the losses its first rank alone."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    script = str(Path(__file__).with_name("alone.py"))
    done = subprocess.run(
        [*launcher, script, str(LIBRARIES[name].program), *words],
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


@pytest.fixture(scope="module")
def plain() -> list[float]:
    losses = losses_of(start("torch", *PRINTED))
    assert len(losses) == 2
    return losses


def test_the_courses_command_line_trains_with_deepspeed_as_printed(plain: list[float]) -> None:
    """`-b … -s … --image-size … --deepspeed --deepspeed_config ds_config_zero2.json`: the losses of plain torch."""
    file = PROGRAMS / "ds_config_zero2.json"
    told = start("deepspeed", *PRINTED, "--deepspeed", "--deepspeed_config", str(file))
    assert losses_of(told) == pytest.approx(plain, abs=1e-5)


def test_the_file_is_the_slides_with_what_the_slide_leaves_out() -> None:
    """The size of a micro-batch, without which DeepSpeed stops; and clipping, which it does at 1.0 unless told."""
    printed, completed = json.loads(SLIDE), json.loads((PROGRAMS / "ds_config_zero2.json").read_text())
    assert {name: completed[name] for name in printed} == printed
    more = {name: value for name, value in completed.items() if name not in printed}
    expected = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "gradient_clipping": 0.0}
    assert more == expected


@pytest.mark.parametrize("line", [
    "parser = deepspeed.add_config_arguments(parser)",
    "model_engine, optimizer, _, _ = deepspeed.initialize(",
    "model_engine.backward(loss)",
    "model_engine.step()",
])  # fmt: skip
def test_the_program_has_the_courses_own_lines(line: str) -> None:
    assert line in LIBRARIES["deepspeed"].program.read_text()


@pytest.mark.skipif(not found("accelerate"), reason="Accelerate is not installed here: make libraries")
def test_accelerate_shards_as_torch_does_once_it_takes_its_plugin(plain: list[float]) -> None:
    """Forced on a CPU, where it would leave the plugin aside: one unit per block and the rest, the losses of DDP."""
    told = start("accelerate", "--forced-fsdp", *PRINTED, "--zero", "3")
    blocks = len(course.build_model(course.parser().parse_args(PRINTED)).blocks)
    printed = "\n".join(told)  # two ranks print at once, so that lines may run together
    assert (printed.count("sharded "), printed.count("sharded WithLoss")) == (2 * (blocks + 1), 2)
    assert losses_of(told) == pytest.approx(plain, abs=1e-5)


@pytest.mark.skipif(not found("accelerate"), reason="Accelerate is not installed here: make libraries")
def test_a_bare_accelerator_makes_no_group_where_there_is_no_gpu(tmp_path: Path) -> None:
    """The trap that the program's `cpu=True` avoids: two processes, each alone on all the data, and nothing is said."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    script = tmp_path / "bare.py"
    script.write_text(
        "from accelerate import Accelerator\n"
        "for cpu in (False, True):\n"
        "    made = Accelerator(cpu=cpu)\n"
        "    print('told', cpu, made.num_processes, made.distributed_type.value)\n"
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
    told = sorted(line for line in done.stdout.splitlines() if line.startswith("told"))
    assert told == ["told False 1 NO"] * 2 + ["told True 2 MULTI_CPU"] * 2, done.stderr[-2000:]
