"""What every other layer stands on: errors, registries, hashing, files, seeds, provenance."""
