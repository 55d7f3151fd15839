"""Parallelism by hand, as the labs teach it: each file is read in one sitting."""
