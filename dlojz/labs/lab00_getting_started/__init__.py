"""Lab 00: its exercises in the order of the notebook, and its predictions."""

from dlojz.labs.kit.exercise_texts import asked_in_notebook
from dlojz.labs.lab00_getting_started import exercises

EXERCISES, PREDICTIONS = asked_in_notebook(__file__, exercises)
