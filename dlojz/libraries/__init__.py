"""One training as users of five libraries write it, and what the lab sees of it from outside."""
