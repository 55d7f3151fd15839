"""Writes steps until its file may not grow any more, and fails then as any program does whose disk is full."""

from workers import stage

log = stage.begin()
for index in range(100_000):
    stage.step(log, index)
