"""Build a federation from a configuration: its networks, clients and server, on this machine."""
