"""Measurements. A package by name: Opacus installs one of the same name, which would be found first."""
