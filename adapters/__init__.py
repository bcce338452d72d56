"""Bridges to other projects: plain environment classes here, and the travel world in TRL."""
