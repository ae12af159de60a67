"""The probe: a node's hardware and software facts in one JSON document."""
