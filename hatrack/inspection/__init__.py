"""What tasks use of a network and share, what is free, and how curved the losses of tasks are."""
