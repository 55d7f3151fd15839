"""Lab 11: its exercises in order, and what the student predicts."""

from dlojz.labs.kit.exercise_texts import asked_in_notebook
from dlojz.labs.lab11_compression import exercises_prune, exercises_quantize, exercises_serve, exercises_train

EXERCISES, PREDICTIONS = asked_in_notebook(
    __file__, exercises_prune, exercises_quantize, exercises_serve, exercises_train
)
