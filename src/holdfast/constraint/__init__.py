"""The chance constraint, its estimators, and the filter that enforces it."""
