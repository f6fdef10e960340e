"""Studies: many cells of models, tasks, defenses, poison ratios and seeds."""
