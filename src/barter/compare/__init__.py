"""Specify and run comparisons: every variant with every seed."""
