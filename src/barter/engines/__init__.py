"""Where clients live: in this process, or elsewhere."""
