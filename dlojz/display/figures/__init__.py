"""Figures of the lab, one module per subject, drawn with matplotlib."""
