"""Bring a joint graph to the few spellings that the operator rows know."""
