"""Privacy attacks on a run: what a server can learn about private images from clients' answers."""
