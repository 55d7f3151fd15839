"""Configuration of a run: its fields, its layout, what cannot be combined, and the engines that run it."""
