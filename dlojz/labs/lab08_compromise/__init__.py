"""Lab 08: its exercises in order, and what the student predicts."""

from dlojz.labs.kit.exercise_texts import asked_in_notebook
from dlojz.labs.lab08_compromise import exercises_alpa, exercises_layouts

EXERCISES, PREDICTIONS = asked_in_notebook(__file__, exercises_alpa, exercises_layouts)
