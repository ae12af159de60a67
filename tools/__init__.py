"""Programs of maintainers: they make what the package ships, and no user needs them."""
