"""``python -m cluster.cli``, the same as ``specdec``."""

import sys

from cluster.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
