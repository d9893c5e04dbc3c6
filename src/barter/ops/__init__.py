"""Pure building blocks that algorithms share."""
