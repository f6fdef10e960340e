"""The harmful fine-tuning protocol's data: roles and poisoning."""
