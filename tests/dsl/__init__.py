"""Tests of the plan language."""
