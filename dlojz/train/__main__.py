"""`python -m dlojz.train`: the name under which the course starts its training in every process.

cli.course`), which knows run folders and records.
"""

import runpy

if __name__ == "__main__":
    runpy.run_module("dlojz.cli.course", run_name="__main__", alter_sys=True)
