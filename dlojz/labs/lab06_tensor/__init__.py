"""Lab 06: its exercises in the order of the notebook, and its predictions."""

from dlojz.labs.kit.exercise_texts import asked_in_notebook
from dlojz.labs.lab06_tensor import exercises_layers, exercises_plan, exercises_vocabulary

EXERCISES, PREDICTIONS = asked_in_notebook(__file__, exercises_layers, exercises_plan, exercises_vocabulary)
