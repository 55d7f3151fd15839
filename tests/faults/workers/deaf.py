"""Goes on whatever signal it is sent."""

import signal
import time

from workers import stage

signal.signal(signal.SIGTERM, signal.SIG_IGN)
log = stage.begin()
index = 0
while True:
    stage.step(log, index)
    index += 1
    time.sleep(0.05)
