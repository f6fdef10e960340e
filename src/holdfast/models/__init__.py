"""Loading, merging and saving models."""
