"""`python -m hone`, the same as the `hone` command."""

import sys

from hone.cli.main import main

sys.exit(main())
