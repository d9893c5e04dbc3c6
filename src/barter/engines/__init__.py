"""Engines, which run the clients in this process or in forked processes."""
