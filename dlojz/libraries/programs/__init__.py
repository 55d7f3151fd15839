"""One training, one program per library: each is read from top to bottom, and runs alone under torchrun.

No program knows of the lab's probes.
"""
