"""Where the tests find things: the project, its own data, and what lies beside it and may be missing."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data"
SHARED = ROOT.parent / "shared"
REFERENCE = SHARED / "reference"
