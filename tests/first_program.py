"""Prints the first program of README, as its difference leads to it: python tests/first_program.py | python -."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
(DIFFERENCE,) = re.findall(r"^```diff\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
PROGRAM = "\n".join(line[1:] for line in DIFFERENCE.splitlines() if not line.startswith("-"))

if __name__ == "__main__":
    print(PROGRAM)
