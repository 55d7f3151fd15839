"""All steps, then completed."""

import stage

stage.begin()
for index in range(stage.CONFIG.steps):
    stage.step(index)
stage.end("completed", "", 0)
