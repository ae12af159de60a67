"""Report an upgrade from its journal: as text, as a page, as a line per step. Pure."""
