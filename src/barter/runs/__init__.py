"""The folder of a run: configuration, metrics, checkpoints; tables and figures."""
