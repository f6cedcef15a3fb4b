"""Parameters whose value, gradient or memory comes when it is used."""
