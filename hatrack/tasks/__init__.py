"""Tasks: data sets as tensors, how a task sees them, and the batches that a step is given."""
