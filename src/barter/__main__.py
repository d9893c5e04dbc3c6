"""python -m barter"""

import sys

from barter.cli import main

sys.exit(main())
