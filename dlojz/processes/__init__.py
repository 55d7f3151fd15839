"""Processes of ranks: fork them, watch them, and say which of them hangs, and why."""
