"""Build a federation from a configuration: configuration, networks, hardware and parties."""
