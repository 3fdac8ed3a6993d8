"""Operators that chunk bodies call beside ATen: attention, accumulating products, grouped products."""
