"""`python -m dlion` is the command `dlion`."""

import sys

from dlion.cli import main

sys.exit(main())
