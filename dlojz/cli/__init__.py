"""Command line of the package: `main` dispatches, one file per group of verbs."""
