"""Failures: the rules that name the cause of one, for a run of the lab's and for anybody's log."""
