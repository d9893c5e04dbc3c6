"""Build a federation from a configuration: networks, clients and server."""
