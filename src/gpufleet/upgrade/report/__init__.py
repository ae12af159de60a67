"""Report an upgrade from its journal: as text, as a page, or as one line per step. Pure."""
