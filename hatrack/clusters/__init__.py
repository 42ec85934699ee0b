"""Runs beyond one process: parts of a command by name, fleets on Ray and on Slurm, one run on several ranks."""
