"""Engines: one way each of training a model on several ranks, behind one interface."""
