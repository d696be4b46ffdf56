"""Layouts: which part of a value each rank holds, the rules of operators over them, and redistribution."""
