"""Measurements of the machine at hand, in the form of a preset."""
