"""Programs that read a node's facts and serve or record them as metrics."""
