"""The report, warnings and hints for the user, and the progress of a compilation."""
