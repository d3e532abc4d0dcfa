"""``python -m spmd``, and the console script ``spmd``: the command line of `spmd.cli`."""

import sys

from spmd.cli.main import main as main

if __name__ == "__main__":
    sys.exit(main())
