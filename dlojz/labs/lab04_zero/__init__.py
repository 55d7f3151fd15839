"""Lab 04: its exercises in the order of the notebook, and its predictions."""

from dlojz.labs.kit.exercise_texts import asked_in_notebook
from dlojz.labs.lab04_zero import exercises_cost, exercises_stages

EXERCISES, PREDICTIONS = asked_in_notebook(__file__, exercises_cost, exercises_stages)
