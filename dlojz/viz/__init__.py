"""Figures and tables of the lab.

Layer 4. Invariant: nothing is computed here; each function reads a `Comparison` or a `RunRecord` and draws it, with
the colour and the hatch that a category has everywhere, and with texts of users never interpreted.
"""
