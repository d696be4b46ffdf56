"""Pipeline stages: which stage runs which call, and what passes between them."""
