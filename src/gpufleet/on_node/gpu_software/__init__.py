"""gpu_software: see docs/architecture.md."""
