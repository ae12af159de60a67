"""What an upgrade did, from its journal: as text, as a page, as a line a step.  Pure."""
