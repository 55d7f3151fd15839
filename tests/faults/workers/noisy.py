"""Prints 10 MB of what nobody should see raw, binary garbage included, and completes."""

import os

from workers import stage

log = stage.begin()
stage.step(log, 0)
for _ in range(160):
    os.write(1, os.urandom(32768) + b"\x1b[2J\r<img src=x onerror=alert(1)>\n" * 1024)
log.write("end", status="completed", reason="")
print("\x1b[31mthe last words\x1b[0m")
