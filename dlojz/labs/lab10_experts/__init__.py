"""Lab 10: its exercises in order, and what the student predicts."""

from dlojz.labs.kit.exercise_texts import asked_in_notebook
from dlojz.labs.lab10_experts import exercises_ranks, exercises_routing

EXERCISES, PREDICTIONS = asked_in_notebook(__file__, exercises_ranks, exercises_routing)
