"""Report an upgrade from its journal: as text, as an HTML page, or as one line per step. Pure."""
