"""Downstream tasks: their examples and how replies are graded."""
