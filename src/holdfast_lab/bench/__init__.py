"""`holdfast bench`: what a training step costs beside TRL's plain SFT, measured in one process and one run."""
