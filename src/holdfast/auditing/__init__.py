"""Evidence about two models: how much worse one of them is on safety data than the other, and what that certifies."""
