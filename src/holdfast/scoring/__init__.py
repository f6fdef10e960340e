"""What a model makes of completions: losses, KL and degradations, by one head for training, evaluation and audits."""
