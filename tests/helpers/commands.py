"""Options that make a run of the command line short."""

SHORT = ["--data", "sample", "--epochs", "1", "--batch", "100", "--train-examples", "100"]
SHORT += ["--widths", "10", "--input-dropout", "0"]  # dropout of 784 pixels would take half of the time
