"""Finishes all its steps and completes."""

from workers import stage

log = stage.begin()
for index in range(stage.CONFIG.steps):
    stage.step(log, index)
log.write("footprint", footprint={"source": "measured", "rank": stage.RANK, "parameters": 1})
log.write("footprint", footprint={"source": "measured", "rank": stage.RANK, "parameters": 2})
log.write("end", status="completed", reason="")
log.close()
