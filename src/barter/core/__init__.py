"""The nouns that an algorithm is written with."""
