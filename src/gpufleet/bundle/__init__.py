"""
Fill a static mirror with packages, keys, wheels and models, for networks without internet access.

The folder of the mirror is called a bundle. `requirements` lists what nodes need (pure). `apt`,
`wheels` and `models` find the files, and `download` fetches them. `collect` writes the folder, and
`serve` serves it over HTTP. In addition, `package_resolution` resolves packages with uv, and
`advisories` looks up known vulnerabilities.
"""
