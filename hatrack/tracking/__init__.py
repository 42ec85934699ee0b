"""One line of JSON per epoch of a run, what is read off the lines, and trackers that take them: TensorBoard, W&B."""
