"""Runs on Flower: the server's engine, the sites, and their supervision."""
