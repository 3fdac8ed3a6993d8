"""What chunk bodies call beside ATen: streaming attention, products that accumulate, grouped products."""
