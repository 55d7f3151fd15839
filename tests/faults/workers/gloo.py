"""Steps that end with a real all-reduce, so that a rank notices when its peer has gone."""

import sys
import time

import torch
import torch.distributed as dist
from workers import stage

dist.init_process_group(
    "gloo", init_method=f"file://{stage.FOLDER}/store", rank=stage.RANK, world_size=stage.CONFIG.layout.world_size
)
log = stage.begin()
index = 0
try:
    while True:
        dist.all_reduce(torch.ones(8))
        stage.step(log, index)
        index += 1
        time.sleep(0.05)
except RuntimeError as error:
    log.write("end", status="failed", reason=str(error))
    sys.exit(1)
