"""Probes: they attach to an engine from outside and turn what happens into figures.

An engine trains the same with and without its probes; no engine knows of them.
"""
