"""dlojz — the lab where big models are taken apart: predict, run, compare, explain.

`import dlojz` loads neither torch nor matplotlib: every name below is fetched when it is first used.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlojz.compare import Comparison, compare
    from dlojz.config.layout import Layout
    from dlojz.config.run_config import RunConfig
    from dlojz.planner import plan
    from dlojz.prediction import predict
    from dlojz.results.footprint import Footprint
    from dlojz.results.record import RunRecord
    from dlojz.running.launch import run, submit_many
    from dlojz.running.limits import preview
    from dlojz.running.run import Run, runs

__version__ = "0.2.0"

_HOME_OF = {
    "Comparison": "dlojz.compare",
    "Footprint": "dlojz.results.footprint",
    "Layout": "dlojz.config.layout",
    "Run": "dlojz.running.run",
    "RunConfig": "dlojz.config.run_config",
    "RunRecord": "dlojz.results.record",
    "compare": "dlojz.compare",
    "plan": "dlojz.planner",
    "predict": "dlojz.prediction",
    "preview": "dlojz.running.limits",
    "run": "dlojz.running.launch",
    "runs": "dlojz.running.run",
    "submit_many": "dlojz.running.launch",
}


class _Package(ModuleType):
    """The package itself: its functions keep their names although modules bear the same ones.

    Importing `dlojz.predict` would bind the module over the function `dlojz.predict`; here the function stays.
    """

    def __getattr__(self, name: str) -> Any:
        if name not in _HOME_OF:
            raise AttributeError(f"dlojz has no name {name!r}; it offers: {', '.join(sorted(_HOME_OF))}.")
        if sys.platform == "win32":
            importlib.import_module("dlojz.base.machine").refuse_windows()
        return getattr(importlib.import_module(_HOME_OF[name]), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_HOME_OF})


sys.modules[__name__].__class__ = _Package

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
