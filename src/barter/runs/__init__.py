"""The folder of a run: configuration, metrics and checkpoints; progress, tables and figures."""
