"""``python -m spmd``, and the console script ``spmd``: the command line of `spmd.cli`."""

import sys

try:
    from spmd.cli.main import main as main
except KeyboardInterrupt:  # as `main` has it from then on
    sys.stderr.write("spmd: interrupted\n")
    sys.exit(130)

if __name__ == "__main__":
    sys.exit(main())
