"""Data sets, how they are split over clients, and the task that comes of it."""
