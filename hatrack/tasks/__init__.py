"""Tasks: data sets as tensors, the transforms of their images, and the batches that a step is given."""
