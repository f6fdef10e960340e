"""Finding what must be held: ask the model the training prompts and bundled probes, and sort its replies."""
