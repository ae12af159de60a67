"""Convert command lines, containers and lists of models to settings.

`detect` tells what a text is, a reader of its kind takes servers out of it (`server`), and
`convert` makes settings of them for a release. None of it runs anything.
"""
