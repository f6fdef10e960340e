"""The version of holdfast: this line is all there is to change for a release, with CHANGELOG.md and CITATION.cff."""

VERSION = "0.2.0"
