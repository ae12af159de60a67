"""Run one upgrade: its journal, its next steps, and its actions on nodes and gateways."""
