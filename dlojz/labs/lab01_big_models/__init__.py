"""Lab 01: its exercises in the order of the notebook, and its predictions."""

from dlojz.labs.kit.exercise_texts import asked_in_notebook
from dlojz.labs.lab01_big_models import exercises

EXERCISES, PREDICTIONS = asked_in_notebook(__file__, exercises)
