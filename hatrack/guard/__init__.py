"""Zero forgetting in a training loop of the user's own: `protect` puts HAT or PMASK into a backbone and its optimizer."""
