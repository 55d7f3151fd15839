"""Results of a run: its footprint, its record, its trajectory."""
