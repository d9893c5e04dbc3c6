"""Recipes: rows of published tables, with the configuration and the stored runs of each."""
