"""Check that a method follows the rules for all methods, also with an adversarial client."""
