"""The one trainer, its defense hooks, its checkpoints."""
