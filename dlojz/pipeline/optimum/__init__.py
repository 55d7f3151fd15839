"""Shortest schedule of a problem, proven: from a table of stored cases, or by a lower bound that is met."""
