"""Growing when full: a wider trunk for later tasks, while every finished task runs at the width it was learned at."""
