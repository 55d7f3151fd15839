"""dlojz — the lab where big models are taken apart: predict, run, compare, explain.

`import dlojz` loads neither torch nor matplotlib: every name below is fetched when it is first used.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlojz.compare import compare as compare
    from dlojz.comparison import Comparison as Comparison
    from dlojz.config import Layout as Layout
    from dlojz.config import RunConfig as RunConfig
    from dlojz.footprint import Footprint as Footprint
    from dlojz.launch import preview as preview
    from dlojz.launch import run as run
    from dlojz.launch import submit_many as submit_many
    from dlojz.plan import plan as plan
    from dlojz.predict import predict as predict
    from dlojz.record import RunRecord as RunRecord
    from dlojz.runs import Run as Run
    from dlojz.runs import runs as runs

__version__ = "0.1.0"

_HOME_OF = {
    "Comparison": "dlojz.comparison",
    "Footprint": "dlojz.footprint",
    "Layout": "dlojz.config",
    "Run": "dlojz.runs",
    "RunConfig": "dlojz.config",
    "RunRecord": "dlojz.record",
    "compare": "dlojz.compare",
    "plan": "dlojz.plan",
    "predict": "dlojz.predict",
    "preview": "dlojz.launch",
    "run": "dlojz.launch",
    "runs": "dlojz.runs",
    "submit_many": "dlojz.launch",
}
__all__ = [
    "Comparison",
    "Footprint",
    "Layout",
    "Run",
    "RunConfig",
    "RunRecord",
    "compare",
    "plan",
    "predict",
    "preview",
    "run",
    "runs",
    "submit_many",
]


class _Package(ModuleType):
    """The package itself: its functions keep their names although modules bear the same ones.

    Importing `dlojz.predict` would bind the module over the function `dlojz.predict`; here the function stays.
    """

    def __getattr__(self, name: str) -> Any:
        if name not in _HOME_OF:
            raise AttributeError(f"dlojz has no name {name!r}; it offers: {', '.join(sorted(_HOME_OF))}.")
        return getattr(importlib.import_module(_HOME_OF[name]), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_HOME_OF})


sys.modules[__name__].__class__ = _Package
