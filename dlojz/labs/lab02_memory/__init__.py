"""Lab 02: its exercises in the order of the notebook, and its predictions."""

from dlojz.labs.kit.exercise_texts import asked_in_notebook
from dlojz.labs.lab02_memory import exercises, exercises_recompute

EXERCISES, PREDICTIONS = asked_in_notebook(__file__, exercises, exercises_recompute)
