"""Models of transformers by their configuration: the class that it names, its inputs and its loss."""
