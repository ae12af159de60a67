"""Define recording rules and alerting rules, by subject."""
