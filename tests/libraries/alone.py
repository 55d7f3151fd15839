"""Starts a program as its user would, `python PROGRAM WORDS…`, on a machine that has been made ready for it.

`--forced-fsdp` lets Accelerate take its way of a GPU on a CPU, where by itself it leaves its plugins aside; `--descent`
has AdamW make steps that grow with the gradient, so that losses tell a gradient that is twice too large.
"""

import importlib
import runpy
import sys
from typing import Any


def as_on_a_gpu() -> None:
    state = importlib.import_module("accelerate.state")
    kind = importlib.import_module("accelerate.utils").DistributedType
    made = state.AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        made(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None and self.distributed_type == kind.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = kind.FSDP, fsdp_plugin
            state.PartialState._shared_state["distributed_type"] = kind.FSDP

    state.AcceleratorState.__init__ = init
    fsdp = importlib.import_module("torch.distributed.fsdp")
    shard = fsdp.fully_shard

    def told(module: Any, **options: Any) -> Any:
        sys.stdout.write(f"sharded {type(module).__name__}\n")
        sys.stdout.flush()
        return shard(module, **options)

    fsdp.fully_shard = told  # type: ignore[attr-defined]


def by_descent() -> None:
    """An update of lr · g / (|g| + 1), by an optimizer of a class that every library knows."""
    torch = importlib.import_module("torch")
    made = torch.optim.AdamW.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        made(self, *args, **{**options, "betas": (0.0, 0.0), "eps": 1.0})

    torch.optim.AdamW.__init__ = init


if __name__ == "__main__":
    words = sys.argv[1:]
    if "--forced-fsdp" in words:
        words.remove("--forced-fsdp")
        as_on_a_gpu()
    if "--descent" in words:
        words.remove("--descent")
        by_descent()
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
