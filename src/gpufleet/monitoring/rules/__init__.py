"""Recording and alerting rules by subject."""
