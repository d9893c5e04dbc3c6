"""Check that a method keeps the rules every method keeps, also with adversarial clients."""
