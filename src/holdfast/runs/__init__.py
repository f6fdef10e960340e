"""A run from its file to its result: settings, stages, the pipeline."""
