"""Imports what does not exist."""

import a_module_that_nobody_wrote  # noqa: F401
