"""Programs to look at runs: the report, the token microscope, the memory plan."""
