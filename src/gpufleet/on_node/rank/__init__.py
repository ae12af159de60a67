"""Program that runs one rank of a multi-node replica."""
