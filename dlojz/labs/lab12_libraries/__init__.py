"""Lab 12: its exercises in order, and what the student predicts."""

from dlojz.labs.kit.exercise_texts import asked_in_notebook
from dlojz.labs.lab12_libraries import exercises_configuration, exercises_loops

EXERCISES, PREDICTIONS = asked_in_notebook(__file__, exercises_configuration, exercises_loops)
