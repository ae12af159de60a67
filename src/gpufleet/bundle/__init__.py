"""Fill a static mirror for a network without the internet: packages, keys, wheels, models.

`requirements` lists what nodes need (pure), `apt`, `wheels` and `models` locate it, `download`
fetches it, `collect` writes the folder, `serve` serves it. Also: `package_resolution` has uv
resolve packages, `advisories` looks up known vulnerabilities.
"""
