"""Helpers beside the tests are imported by name; engines that several tests share are loaded once."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
