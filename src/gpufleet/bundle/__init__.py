"""Fill a static mirror for networks without internet access: packages, keys, wheels, models.

`requirements` lists the needs of nodes (pure), `apt`, `wheels` and `models` locate the files,
`download` fetches them, `collect` writes the folder, and `serve` serves it. Also,
`package_resolution` resolves packages with uv, and `advisories` looks up known vulnerabilities.
"""
