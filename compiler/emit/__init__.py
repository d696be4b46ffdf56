"""Emission: the program folder."""
