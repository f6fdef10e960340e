"""The report of a run and its model card, from stored files alone: no torch, no script, no network."""
