"""A small world, exercises and a model of 2M parameters, for training on a laptop."""
