"""Programs to look at runs: the report, the microscope of tokens, the memory plan."""
