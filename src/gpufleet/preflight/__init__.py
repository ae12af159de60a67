"""Check, with a proof for each condition, whether a fleet can be opened to users. Pure."""
