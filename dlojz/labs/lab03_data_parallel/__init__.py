"""Lab 03: its exercises in the order of the notebook, and its predictions."""

from dlojz.labs.kit.exercise_texts import asked_in_notebook
from dlojz.labs.lab03_data_parallel import exercises_ddp, exercises_ring

EXERCISES, PREDICTIONS = asked_in_notebook(__file__, exercises_ddp, exercises_ring)
