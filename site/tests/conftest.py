"""Puts the derivation's rungs and the site's tools on the path, the way their own scripts find each other."""

from __future__ import annotations

import sys
from pathlib import Path

SITE = Path(__file__).parents[1]
for folder in (SITE / "steps", SITE / "tools", SITE / "tests"):
    sys.path.insert(0, str(folder))
