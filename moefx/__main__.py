"""`python -m moefx`."""

import sys

from moefx.cli import main

sys.exit(main())
