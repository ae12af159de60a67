"""Programs for maintainers: they write files of the package or check the project."""
