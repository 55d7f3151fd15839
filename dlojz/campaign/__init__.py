"""What an instructor does with the lab: campaigns of measurements, their reports, and the class at a glance.

Nothing is submitted before the whole campaign is known to be legal; what has been measured is never measured again
unasked; a folder that belongs to somebody else is read and never written.
"""
