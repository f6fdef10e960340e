"""holdfast inside other fine-tuning stacks: each package is loaded by that stack, and imports it."""
