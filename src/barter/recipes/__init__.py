"""Recipes: rows of published tables, each with its configuration and stored runs."""
