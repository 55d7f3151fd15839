"""Probes: they attach to an engine from outside and turn what happens into figures.

Layer 3. Invariant: an engine trains the same with and without its probes; no engine knows of them.
"""
