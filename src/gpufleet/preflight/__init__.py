"""What has to be true before users come: a list of lines, each with its proof.  Pure."""
