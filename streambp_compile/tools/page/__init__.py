"""A report as files to look at: an HTML page, a memory snapshot, JSON."""
