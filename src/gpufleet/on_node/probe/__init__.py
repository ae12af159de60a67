"""The probe: what a node is, in one JSON document."""
