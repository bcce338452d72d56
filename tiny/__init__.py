"""A small world, exercises and a model of 3M parameters, for training on a laptop."""
