"""`python -m flashtri_bench`."""

import sys

from .cli import main

sys.exit(main())
