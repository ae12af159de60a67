"""A package transaction by apt or dnf."""
