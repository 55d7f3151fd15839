"""Train on every rank: engines, probes that attach from outside, checkpoints, and one loop."""
