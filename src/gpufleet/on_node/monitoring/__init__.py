"""Programs that read facts about a node, and record or serve them as metrics."""
