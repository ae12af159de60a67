"""Fill a static mirror for a network without the internet: packages, keys, wheels, models.

`needs` says what nodes take (pure), `apt`, `wheels` and `models` find where it is, `download`
brings it, `collect` writes the folder, `serve` hands it out. Beside them what else asks about
packages: `package_resolution` has uv resolve, `advisories` asks what is known of them.
"""
