"""Cells that run on several ranks: `%%ranks 4`, and `ranks["x"]` to look at what they hold.

In a notebook, after `%load_ext dlojz.ranks`:

    %%ranks 4
    x = torch.ones(1) * rank
    dist.all_reduce(x)

Importing this loads neither torch nor ipyparallel; the first cell does, in separate processes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlojz.ranks.live import Ranks
    from dlojz.ranks.rank_setup import RanksRefused, RanksToDo
    from dlojz.ranks.show import RanksError


_MODULES = {"Ranks": "live", "RanksError": "show", "RanksRefused": "rank_setup", "RanksToDo": "rank_setup"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def load_ipython_extension(shell: Any) -> None:
    """Give a notebook `%%ranks`, `%ranks` and the variable `ranks`; called by `%load_ext dlojz.ranks`."""
    from dlojz.ranks.magic import register

    register(shell)


__all__ = ["Ranks", "RanksError", "RanksRefused", "RanksToDo", "load_ipython_extension"]
