"""The rules of the operators, by kind. Importing this package registers them."""
