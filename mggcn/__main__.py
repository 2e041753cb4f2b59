"""`python -m mggcn` is the command."""

import sys

from mggcn.cli import main

sys.exit(main())
