"""Files: atomic writes and bounded reads, tensor files, and checks of what a file holds."""
