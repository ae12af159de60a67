"""Recording and alert rules, by subject."""
