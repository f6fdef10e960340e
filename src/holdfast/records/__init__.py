"""Torch-free readers and writers of what a run, an audit or a certification leaves; `stored_evidence` judges them."""
