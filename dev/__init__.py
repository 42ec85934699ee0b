"""Tools for those who work on hatrack: documents, comparisons of records, sample data."""
