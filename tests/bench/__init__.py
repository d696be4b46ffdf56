"""Measurements. They assert nothing about time: absolute times of shared machines prove nothing."""
