"""Training: the fit loop, the trainer, checkpoints and saved models."""
