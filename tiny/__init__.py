"""A small world, exercises and a model of 2M parameters, for training on a laptop."""
import sys

if {"tiny.model", "tiny.drills", "tiny.worlds"} & set(sys.orig_argv):  # python -m tiny.model
    sys.exit("type python -m tiny with model, drills or world; python -m tiny --help")
