"""Steps until SIGTERM."""

import signal

import stage

stage.begin()
index = 0
while signal.SIGTERM not in stage.told:
    stage.step(index)
    index += 1
stage.end("cancelled", f"rank {stage.RANK} was told to stop (SIGTERM).", 1)
