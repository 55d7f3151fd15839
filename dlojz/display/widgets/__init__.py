"""Panels of a notebook: each is an interactive widget, and a static page where there is none."""
