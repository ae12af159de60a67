"""Convert command lines, containers and lists of models to settings.

`detect` recognises a text's kind, its reader returns the servers in it (`server`), and `convert`
turns them into settings for a release. The importer runs none of these commands.
"""
