"""Kit of the labs: exercises, judges, hints, progress, and the builder of notebooks and book."""
