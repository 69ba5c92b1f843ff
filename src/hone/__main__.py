"""`python -m hone`, the same as the `hone` command."""

import sys


def _main() -> int:
    try:
        from hone.cli.main import main

        return main()
    except KeyboardInterrupt:  # while modules are imported
        return 130


sys.exit(_main())
