"""Programs that run package transactions with apt or dnf."""
