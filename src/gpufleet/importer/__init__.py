"""What people have, turned into settings: command lines, containers, lists of models.

`detect` tells what a text is, a reader of its kind takes servers out of it (`server`), and
`convert` makes settings of them for a release. None of it runs anything.
"""
