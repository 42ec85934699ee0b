"""What a network that keeps its tasks lets one see: which weights each task uses, what they share, what is free."""
