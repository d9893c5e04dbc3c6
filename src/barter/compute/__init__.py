"""Execution of training steps: lanes, graphs, precision, threads, kernels.

Nothing here knows of clients or servers.
"""
