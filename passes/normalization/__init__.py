"""Rewrite a joint graph into the few forms that the table of operators knows."""
