"""The examples of every rule, which the unit tests run part by part, run on devices too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "unit"))
