"""`python -m ep`: see ep.cli."""

import sys

from ep.cli import main

if __name__ == "__main__":
    sys.exit(main())
