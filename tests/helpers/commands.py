"""Options that make a run of the command line short."""

SHORT = ["--data", "sample", "--epochs", "1", "--batch", "100", "--widths", "10", "--train-examples", "100"]
