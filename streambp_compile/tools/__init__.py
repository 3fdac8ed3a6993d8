"""Accessories that no compilation needs: the planner, the page of a report, tiled heads of trainers."""
