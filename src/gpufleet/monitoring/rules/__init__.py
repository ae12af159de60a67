"""Recording and alert rules, by what they are about."""
