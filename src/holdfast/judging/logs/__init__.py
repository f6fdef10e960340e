"""Readers of other tools' evaluation logs, and pairs of them. No torch; every file is taken for hostile."""
