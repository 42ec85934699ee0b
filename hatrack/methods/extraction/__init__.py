"""A network per task, cut to the channels that the task uses: captured as a graph, folded, cut, and compared."""
