"""Tell the names of models from elsewhere from those of the catalogue, and names of the Hub; loads no torch."""

import os
import re
from pathlib import Path
from typing import TypeGuard

from dlojz.base.errors import LabError
from dlojz.base.language import Sentences

model_sentence = Sentences(Path(__file__).parents[1] / "data" / "models.md")
"""Writes the sentences on models: what is refused, and why."""


def is_elsewhere(name: object) -> TypeGuard[str]:
    """Tell whether a name is that of a model from elsewhere: `timm:resnet50`, `my_file.py:build`.

    So is that of a file without its function, which is refused when it is looked up.
    """
    return isinstance(name, str) and (":" in name or name.endswith(".py"))


def shown_name(name: str) -> str:
    """Shorten the name of a model in a file as tables and sentences show it: without the folders before it.

    A `config.json` keeps its own folder, which is what it is known by; adapters at the end of a name are left out.
    """
    folder, _, file_name = name.partition("#lora=")[0].rpartition("/")
    return f"{folder.rpartition('/')[2]}/{file_name}" if file_name == "config.json" else file_name


def is_hub_name(name: object) -> TypeGuard[str]:
    """Tell whether a name may be a model of the Hub, `owner/model`, or its folder here; a file is neither."""
    return isinstance(name, str) and re.fullmatch(r"[\w.-]*\w/[\w.-]+", name) is not None and not os.path.isfile(name)  # noqa: PTH113


def no_configuration(name: str) -> LabError:
    """Make the refusal of a model of Hugging Face that is no folder with a config.json here, with the way to get one.

    Args:
        name: As received: a name of the Hub, `meta-llama/Llama-2-7b-hf`, or a path.
    """
    owner, _, model = name.partition("/")
    repository = name if owner.strip(".~") and model and "/" not in model else "OWNER/MODEL"
    folder = model if repository == name else "FOLDER"
    if (Path(name).expanduser() / "config.json").is_file():
        return model_sentence.refused("folder without its prefix", name=name)
    return model_sentence.refused("no config.json here", name=name, repository=repository, folder=folder)
