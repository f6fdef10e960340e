"""The demonstration: plain SFT against holdfast on an embedded model and shipped data."""
