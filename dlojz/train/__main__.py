"""`python -m dlojz.train`: the name under which the course starts its training in every process.

Layer 3, and a front door, not a part of the house: nothing imports it, and all it does is to hand over to the command
line (`dlojz.cli.course`), which knows run folders and records.
"""

import runpy

if __name__ == "__main__":
    runpy.run_module("dlojz.cli.course", run_name="__main__", alter_sys=True)
