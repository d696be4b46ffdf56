"""Ahead-of-time differentiation of segments: recording, transposes of planc's operators, what is saved."""
