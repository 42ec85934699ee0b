"""Looking at runs while they go on: the page of a report, served on this machine alone."""
