"""Buckets and instruction streams."""
