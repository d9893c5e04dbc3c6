"""A run is a folder: what it was asked, what it measured, where it can go on."""
