"""The error of the lab: a request that it refuses, in words to act on.

It stands below everything, the sentences' language included.
"""

from __future__ import annotations


class LabError(ValueError):
    """A request the lab refuses; the message is one sentence that a student can act on."""
