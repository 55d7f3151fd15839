"""Tell the names of models from elsewhere from those of the catalogue; loads no torch."""

from __future__ import annotations

from typing import TypeGuard


def is_elsewhere(name: object) -> TypeGuard[str]:
    """Tell whether a name is that of a model from elsewhere: `timm:resnet50`, `my_file.py:build`.

    So is that of a file without its function, which is refused when it is looked up.
    """
    return isinstance(name, str) and (":" in name or name.endswith(".py"))
