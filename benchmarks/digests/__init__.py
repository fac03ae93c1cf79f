"""What is made from several files of results, a file per kind of section."""

from ..core.study import Digest
from . import calls, dampings, overview, verdicts

#: Name of a section → how it is made.
DIGESTS: dict[str, Digest] = overview.DIGESTS | verdicts.DIGESTS | dampings.DIGESTS | calls.DIGESTS
