"""The real worker, whose address space has little room left once its ranks have met: its allocator is refused memory.

Threads are started before that, as each reserves addresses for itself.
"""

import resource
import sys
from pathlib import Path

import torch

from dlojz.config.run_config import RunConfig
from dlojz.running.worker import main
from dlojz.train import loop

ROOM_BYTES = 600 * 2**20
_build_model = loop.build_model


def build_cramped(config: RunConfig) -> torch.nn.Module:
    """Build the model, then leave `ROOM_BYTES` for all that follows."""
    model = _build_model(config)
    mapped_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes + ROOM_BYTES,) * 2)
    return model


if __name__ == "__main__":
    loop.build_model = build_cramped
    sys.exit(main(Path(sys.argv[1])))
