"""Lab 05: its exercises in the order of the notebook, and its predictions."""

from dlojz.labs.kit.exercise_texts import asked_in_notebook
from dlojz.labs.lab05_pipeline import exercises_orders, exercises_runs

EXERCISES, PREDICTIONS = asked_in_notebook(__file__, exercises_orders, exercises_runs)
