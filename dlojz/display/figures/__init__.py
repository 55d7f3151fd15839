"""Figures: each function draws one, writes it to `path` if given, and raises a LabError if that cannot be done."""
