"""The laboratory: baseline defenses, tasks, the protocol, evaluation, studies and their tables.

It registers its names with `holdfast` through entry points (pyproject.toml); `holdfast` never imports it.
"""
