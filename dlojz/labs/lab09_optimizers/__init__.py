"""Lab 09: its exercises in order, and what the student predicts."""

from dlojz.labs.kit.exercise_texts import asked_in_notebook
from dlojz.labs.lab09_optimizers import exercises_compression, exercises_updates

EXERCISES, PREDICTIONS = asked_in_notebook(__file__, exercises_compression, exercises_updates)
