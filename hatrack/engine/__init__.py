"""The engine: optimizers, and how training steps run on a CPU or a GPU."""
