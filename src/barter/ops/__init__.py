"""Pure building blocks that several algorithms share."""
