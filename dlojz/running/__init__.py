"""Run: launch a training here or on a cluster, follow it, and read what came of it."""
