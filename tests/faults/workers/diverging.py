"""Two finite steps, then a loss that is not a number: the run ends there and the worker exits with 0."""

from workers import stage

log = stage.begin()
stage.step(log, 0)
stage.step(log, 1)
log.write("end", status="diverged", reason="the loss is NaN at step 2 on every rank: lower the learning rate.")
log.close()
