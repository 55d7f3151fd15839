"""One training, one program per library: each is read from top to bottom, and runs alone under torchrun.

Layer 3, loaded one by one, as each loads its library. Invariant: no program knows of the lab's probes.
"""
