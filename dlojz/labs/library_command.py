"""Lab 12: the course's command line, run as it is printed: a program, DeepSpeed's options, and the student's JSON.

Layer 6 (labs). Invariant: the command is a list of words, never a text for a shell; it runs in a folder of its own,
with a limit of time, and whatever becomes of it is told.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlojz.labs.library_course_json_exercises import COURSE
from dlojz.labs.pipeline_figures import or_to_do
from dlojz.libraries import LIBRARIES
from dlojz.patience import patience
from dlojz.text import say
from dlojz.viz.markup import safe

FILE = "ds_config_zero2.json"
WALL_S = 120.0
LINES = 12


@dataclass(frozen=True)
class Ran:
    """A command, the file that it read, and what it printed on the first rank."""

    command: str
    document: str
    printed: str

    def __str__(self) -> str:
        return f"{FILE}:\n{self.document}\n\n$ {self.command}\n{self.printed}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        document = "\n".join(safe(line) for line in self.document.split("\n"))
        printed = "\n".join(safe(line) for line in self.printed.split("\n"))
        return f"<b>{safe(FILE)}</b><pre>{document}</pre><pre>$ {safe(self.command)}\n{printed}</pre>"


@or_to_do
def course_command(
    complete: Callable[..., Mapping[str, Any]], *, global_batch: int = 16, fits: int = 4, steps: int = 3
) -> Ran:
    """Run DeepSpeed's program on two processes with the course's options and the student's JSON.

    Args:
        complete: the student's function.
        global_batch: samples of a step.
        fits: samples of a micro-batch, at most.
        steps: of the training.
    """
    document = dict(complete(COURSE, global_batch, 2, fits))
    text = json.dumps(document, indent=4)
    micro, accumulation = (
        document.get(key, 1) for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    program = LIBRARIES["deepspeed"].program
    words = [
        *("--nproc-per-node", "2", str(program), "-b", str(micro), "-s", str(steps), "--accumulation"),
        *(str(accumulation), "--model", "gpt_tiny", "--deepspeed", "--deepspeed_config", FILE),
    ]
    shown = " ".join(["torchrun", *(program.name if word == str(program) else word for word in words)])
    with tempfile.TemporaryDirectory(prefix="course-") as folder:
        Path(folder, FILE).write_text(text, encoding="utf-8")
        return Ran(shown, text, _printed([sys.executable, "-m", "torch.distributed.run", *words], folder))


def _printed(command: list[str], folder: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=WALL_S * patience(),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return say(
            en=f"The command was stopped after {error.timeout:.0f} s: run the cell again when the machine is less "
            "busy.",
            fr=f"La commande a été arrêtée au bout de {error.timeout:.0f} s : relancez la cellule quand la machine "
            "sera moins chargée.",
        )
    told = [line for line in done.stdout.splitlines() if line.startswith("loss")]
    if done.returncode == 0 and told:
        return "\n".join(told)
    refused = [line for line in done.stderr.splitlines() if "Error" in line]
    return "\n".join(refused[:1] or done.stderr.splitlines()[-LINES:])
