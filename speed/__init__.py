"""What is fast, measured."""
