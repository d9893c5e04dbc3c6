"""Execution of steps: lanes, graphs, precision, threads, kernels; independent of the parties."""
