"""Load, evaluate and export the networks that a run has trained."""
