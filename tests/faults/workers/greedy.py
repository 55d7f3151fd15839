"""One step, then rank 1 asks for more memory than there is."""

import time

from workers import stage

log = stage.begin()
stage.step(log, 0)
if stage.RANK == 1:
    bytearray(2**60)
time.sleep(600)
