"""Convert command lines, containers and lists of models to settings.

`detect` recognises the kind of a text and calls the reader for this kind. The reader returns the
servers in the text, as defined in `server`. `convert` turns these servers into settings for a
release. The importer runs none of the commands that it reads.
"""
