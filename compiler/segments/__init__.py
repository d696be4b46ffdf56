"""Cutting a model's graph into segments, and finding equal ones."""
