"""python -m barter"""

import sys

from barter.cli.app import main

sys.exit(main())
