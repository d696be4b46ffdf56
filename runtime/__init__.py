"""planc's runtime: runs compiled programs. Imports torch, never `compiler`."""
