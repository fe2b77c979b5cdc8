"""Stages: layers, submeshes, and the dynamic programme that puts them together."""
