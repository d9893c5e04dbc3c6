"""Engines, which run the clients of a federation: in this process or in forked processes."""
