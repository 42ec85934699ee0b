"""The engine: how training steps run, on a CPU or a GPU."""
