"""Lab 13: its exercises in the order of the notebook, and its predictions."""

from dlojz.labs.kit.exercise_texts import asked_in_notebook
from dlojz.labs.lab13_checkpoints import exercises, formats

EXERCISES, PREDICTIONS = asked_in_notebook(__file__, exercises, formats)
