"""Privacy attacks: what a server can learn about images from answers."""
