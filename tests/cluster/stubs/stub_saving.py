"""Steps until SIGUSR2, then a checkpoint and code 75; started again, it goes on from there and completes."""

import signal

import stage

checkpoint = stage.FOLDER / f"saved-{stage.RANK}"
index = int(checkpoint.read_text()) if checkpoint.exists() else 0
last = index + 3 if checkpoint.exists() else 100_000
stage.begin()
while index < last and signal.SIGUSR2 not in stage.told and signal.SIGTERM not in stage.told:
    stage.step(index)
    index += 1
if signal.SIGUSR2 in stage.told:
    checkpoint.write_text(str(index))
    stage.end("timeout", "a checkpoint was kept before the time limit.", 75)
if stage.told:
    stage.end("cancelled", f"rank {stage.RANK} was told to stop (SIGTERM).", 1)
stage.end("completed", "", 0)
