"""DeepSpeed, which has an environment of its own: `make test-deepspeed`."""
