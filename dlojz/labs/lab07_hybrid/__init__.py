"""Lab 07: its exercises in order, and what the student predicts."""

from dlojz.labs.kit.exercise_texts import asked_in_notebook
from dlojz.labs.lab07_hybrid import exercises

EXERCISES, PREDICTIONS = asked_in_notebook(__file__, exercises)
