"""One pass for the task's and the constraints' gradients: packed rows, grouped LoRA gradients, recorded kernels."""
