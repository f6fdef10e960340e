"""What happens to a model, in order: fine-tuning (alignment and post-hoc repair come with the protocol)."""
