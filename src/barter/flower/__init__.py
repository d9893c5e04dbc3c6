"""Runs on Flower: the server's engine, the sites, and the supervision of their processes."""
