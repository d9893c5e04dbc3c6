"""Check that a method follows the rules for all methods.

One rule is that an adversarial client does no harm.
"""
