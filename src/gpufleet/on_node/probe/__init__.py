"""The probe: a program that prints a node's hardware and software facts as one JSON document."""
