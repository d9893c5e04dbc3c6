"""Data sets, their partition over clients, and the task of a run."""
