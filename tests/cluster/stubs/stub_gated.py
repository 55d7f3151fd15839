"""Steps until a file `go` appears in the run folder, then completed; or until SIGTERM."""

import signal

import stage

stage.begin()
index = 0
while not (stage.FOLDER / "go").exists() and signal.SIGTERM not in stage.told:
    stage.step(index)
    index += 1
if stage.told:
    stage.end("cancelled", f"rank {stage.RANK} was told to stop (SIGTERM).", 1)
stage.end("completed", "", 0)
