"""Where the fixtures lie, for every test file; their README says what they are."""

from pathlib import Path

FIXTURES = Path(__file__).parent / "fixtures"
TINY = FIXTURES / "tiny"
