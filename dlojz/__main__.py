"""`python -m dlojz`: the same as the command `dlojz`."""

import sys

from dlojz.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
