"""How long commands take that ask no node."""
