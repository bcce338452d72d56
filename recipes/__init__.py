"""The recipes that run.sh sources, and the statistics of the papers' axes."""
