"""The command line that asks for a configuration, as a sentence of advice ends with it.

Layer 5. Invariant: what it says asks for exactly that configuration, and only what differs from the defaults is said.
"""

from __future__ import annotations

import shlex

from dlojz.config import RunConfig

HIDDEN = ("layout", "schema_version")
"""Fields of a configuration that are no options."""


def command_of(config: RunConfig, command: str = "run") -> str:
    """The command line that asks for a configuration: only what differs from the defaults is written."""
    plain = RunConfig.of(model=config.model)
    words = ["dlojz", command, "--model", config.model]
    for own, default in ((config, plain), (config.layout, plain.layout)):
        for name in type(own).model_fields:
            value = getattr(own, name)
            if name in (*HIDDEN, "model") or value == getattr(default, name):
                continue
            words.append("--" + name.replace("_", "-"))
            if value is not True:
                words.append(str(value))
    return shlex.join(words)
