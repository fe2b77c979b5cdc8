"""Drivers, one per question."""
