"""Run barter's command line by `python -m barter`."""

import sys

from barter.cli.app import main

sys.exit(main())
