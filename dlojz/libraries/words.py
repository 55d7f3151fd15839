"""The command line by which a program is asked for a run.

Layer 3. Invariant: these are the words that a user would type behind the program's name; nothing reaches a program
otherwise.
"""

from __future__ import annotations

import ast
import shlex
from pathlib import Path

from dlojz.config import RunConfig
from dlojz.libraries import library

PLACEHOLDER = Path("ds_config.json")


def words_of(config: RunConfig, deepspeed_file: Path = PLACEHOLDER) -> list[str]:
    """The words for this run, what is at its default left out.

    Args:
        config: the run.
        deepspeed_file: DeepSpeed's configuration, which is named where the library reads one.
    """
    layout = config.layout
    given: list[tuple[str, object, object]] = [
        ("--model", config.model, None),
        ("--data", config.data_name, None),
        ("--data-root", config.data_root, None),
        ("--image-size", config.image_size, None),
        ("--sequence-length", config.sequence_length, None),
        ("--batch-size", layout.micro_batch, None),
        ("--accumulation", layout.micro_batches, 1),
        ("--steps", config.steps, None),
        ("--lr", config.learning_rate, 1e-3),
        ("--weight-decay", config.weight_decay, 0.0),
        ("--seed", config.seed, 0),
        ("--zero", 0 if layout.engine == "deepspeed" else layout.zero, 0),  # then it is in the JSON file
        ("--tp", layout.tp, 1),
        ("--pp", layout.pp, 1),
        ("--device", config.device, "auto"),
    ]
    words = [word for name, value, usual in given if value not in (None, usual) for word in (name, str(value))]
    if config.library == "deepspeed":
        words.append("--deepspeed")
    if layout.engine == "deepspeed":
        words += ["--deepspeed_config", str(deepspeed_file)]
    return words


def command_alone(name: str) -> str:
    """The command line that a library's program is headed with, as it can be typed here: with whole paths."""
    one = library(name)
    said = ast.get_docstring(ast.parse(one.program.read_text(encoding="utf-8"))) or ""
    words = shlex.split(said.splitlines()[-1])
    folder = one.program.parent
    words = [str(folder / word) if (folder / word).is_file() else word for word in words]
    own = [str(one.python), "-m", "torch.distributed.run"] if one.python else [words[0]]
    return shlex.join([*own, *words[1:]])
