"""A fleet as one page for people who have no access to it, and as a manifest that rebuilds it."""
