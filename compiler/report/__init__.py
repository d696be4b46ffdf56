"""What planc shows: tables, printed graphs, explanations."""
